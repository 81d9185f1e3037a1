"""Run `kvpolicy compress`: a small model shortens a prompt for any server to answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import kvpolicy
from kvpolicy.evaluation.commands.analyze_oracle import chosen_scorers
from kvpolicy.evaluation.commands.options import ScorerOption
from kvpolicy.evaluation.commands.terminal import (
    BeyondPositionsOption,
    DeviceOption,
    DtypeOption,
    load_shown,
)
from kvpolicy.evaluation.compression.chat import read_messages
from kvpolicy.evaluation.compression.chunks import ALIGNMENTS
from kvpolicy.evaluation.compression.compress import (
    DEFAULT_RATE,
    check_extent,
    compress_prompt,
    rendered_of,
)
from kvpolicy.evaluation.compression.compressed import CompressedPrompt
from kvpolicy.evaluation.compression.scoring import (
    FilterLayerScorer,
    LookAheadScorer,
    PromptScorer,
)
from kvpolicy.evaluation.models import Loaded
from kvpolicy.evaluation.readable import check_known, check_positions
from kvpolicy.evaluation.results import check_file, write_all
from kvpolicy.evaluation.tasks.prompts import read_prompt, read_text


def compress(
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The prompt, UTF-8 text, or - for standard input; line ends at its end are cut "
            "off.",
        ),
    ] = None,
    chat_file: Annotated[
        Path | None,
        typer.Option(
            "--chat-file",
            metavar="FILE",
            help='In its place a chat, JSON: messages, or a request body with "messages". "keep" '
            "in a message: true, false, or the text that is not cut.",
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="The small model that chooses: a folder, a Hub name, or needle or ruler_words "
            "for a bundled model.",
        ),
    ] = "needle",
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate",
            "-r",
            metavar="RATE",
            help=f"Fraction of the chunks that is kept, in (0, 1]; default {DEFAULT_RATE}.",
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Tokens that are kept at most, in place of a rate."),
    ] = None,
    chunk: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of a chunk.")] = 32,
    align: Annotated[
        str,
        typer.Option(metavar="NAME", help=f"Where chunks end: at a {', '.join(ALIGNMENTS)}."),
    ] = "word",
    keep: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="A part of the prompt that is never cut, repeatable."),
    ] = None,
    gap: Annotated[
        str, typer.Option(metavar="TEXT", help="What stands where something was left out.")
    ] = "",
    look_ahead: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Decoded tokens whose attention is the score; default 8."
        ),
    ] = None,
    pool: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Odd: it is pooled over N tokens; default 13."),
    ] = None,
    scorer: ScorerOption = None,
    filter_layer: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="In place of a look-ahead, GemFilter's score, or --scorer's, at this layer from "
            "0; default: half depth.",
        ),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--no-chat", help="Chat template; by default where there is one."),
    ] = None,
    ids: Annotated[
        bool, typer.Option("--ids", help="Write the model's token ids, JSON, in place of text.")
    ] = False,
    request: Annotated[
        str | None,
        typer.Option(
            "--request",
            metavar="NAME",
            help="Write the body of a request to an OpenAI-compatible server, JSON, that serves "
            "a model by this name.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to; default: standard output.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers there.")
    ] = None,
    beyond_positions: BeyondPositionsOption = False,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
) -> None:
    """Leave out of a prompt what a small model does not look at; nothing is sent anywhere.

    The shorter prompt goes to stdout, what was left out to stderr.
    """
    for option, file in (("--out", out), ("--json", json_file)):
        if file is not None:
            check_file(option, file)
    check_extent(rate, tokens, chunk, align)
    chosen = _scorer(look_ahead, pool, scorer, filter_layer)
    prompt, body = _prompt(prompt_file, chat_file)
    loaded = load_shown(model, dtype, device)
    _check_readable(loaded, prompt, chat, beyond_positions)
    with Console(stderr=True).status("reading the prompt"):
        found = compress_prompt(
            loaded.model,
            loaded.tokenizer,
            prompt,
            rate=rate,
            tokens=tokens,
            scorer=chosen,
            chunk_size=chunk,
            align=align,
            keep=keep or (),
            gap=gap,
            chat=chat,
        )
    written = _written(found, body, request, ids=ids)
    if out is None:
        typer.echo(written)
    else:
        write_all(out.parent, {out.name: f"{written}\n".encode()})
    if json_file is not None:
        settings = {"model": model, "rate": rate, "tokens": tokens, "chunk": chunk, "align": align}
        data = {"kvpolicy": kvpolicy.__version__, "settings": settings, **found.as_data()}
        text = json.dumps(data, indent=2, allow_nan=False)
        write_all(json_file.parent, {json_file.name: text.encode()})
    errors = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    errors.print(found.report())
    for file in (out, json_file):
        if file is not None:
            errors.print(f"written to {file}")


def _scorer(
    look_ahead: int | None, pool: int | None, scorer: str | None, filter_layer: int | None
) -> PromptScorer:
    if scorer is None and filter_layer is None:
        given = {"steps": look_ahead, "kernel_size": pool}
        return LookAheadScorer(**{name: value for name, value in given.items() if value})
    for option, value in (("--look-ahead", look_ahead), ("--pool", pool)):
        if value is not None:
            raise ValueError(
                f"{option} must not be given with --scorer or --filter-layer, which decode "
                f"nothing, got {value}"
            )
    if scorer is None:
        return FilterLayerScorer(filter_layer=filter_layer)
    (part,) = chosen_scorers([scorer]).values()
    return FilterLayerScorer(part, filter_layer)


def _prompt(prompt_file: Path | None, chat_file: Path | None) -> tuple[Any, dict[str, Any]]:
    """Read the prompt, and the other fields of the request body that it came in."""
    if (prompt_file is None) == (chat_file is None):
        got = "neither" if prompt_file is None else "both"
        raise ValueError(f"one of --prompt-file and --chat-file must be given, got {got}")
    if prompt_file is not None:
        return read_prompt(prompt_file), {}
    assert chat_file is not None
    try:
        given = json.loads(read_text(chat_file, "chat file"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"chat file {chat_file} must be JSON, got none: {error.msg} at line {error.lineno}"
        ) from None
    body = given if isinstance(given, dict) else {"messages": given}
    if not isinstance(body.get("messages"), list):
        raise ValueError(
            f'chat file {chat_file} must hold a list of messages, or an object with "messages", '
            "got neither"
        )
    try:
        read_messages(body["messages"])
    except TypeError as error:  # in a file it is the user's words that are wrong
        raise ValueError(f"chat file {chat_file}: {error}") from None
    return body["messages"], {key: value for key, value in body.items() if key != "messages"}


def _check_readable(loaded: Loaded, prompt: Any, chat: bool | None, beyond: bool) -> None:
    """Check that the model knows words of the prompt and has positions for its tokens."""
    _, rendered = rendered_of(loaded.tokenizer, prompt, chat)
    contents = " ".join(rendered.text[start:end] for start, end in rendered.contents)
    check_known(loaded.tokenizer, loaded.tokenizer.encode(contents), "prompt")
    ids = loaded.tokenizer.encode(rendered.text, add_special_tokens=rendered.special)
    check_positions(loaded, len(ids), beyond=beyond)


def _written(
    found: CompressedPrompt, body: dict[str, Any], served: str | None, *, ids: bool
) -> str:
    if served is None:
        return json.dumps(list(found.ids)) if ids else found.text
    fields = {key: value for key, value in body.items() if key != "model"}
    request = found.request(served, as_ids=ids, **fields)
    return json.dumps(request, indent=2, ensure_ascii=False)
