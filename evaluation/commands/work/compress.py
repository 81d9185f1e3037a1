"""Do the work of `kvpolicy compress`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

import kvpolicy
from kvpolicy.evaluation.commands.compress import CompressOptions
from kvpolicy.evaluation.commands.work.analyze_oracle import chosen_scorers
from kvpolicy.evaluation.commands.work.terminal import load_shown, plain_console
from kvpolicy.evaluation.compression.chat import read_messages
from kvpolicy.evaluation.compression.compress import (
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
from kvpolicy.evaluation.results import as_json, check_file, write_all
from kvpolicy.evaluation.tasks.prompts import read_prompt, read_text


def run_compress(options: CompressOptions) -> None:
    """Do what `kvpolicy compress` does."""
    out, json_file = options.out, options.json_file
    for option, file in (("--out-file", out), ("--json", json_file)):
        if file is not None:
            check_file(option, file)
    check_extent(options.rate, options.tokens, options.chunk, options.align)
    chosen = _scorer(options)
    prompt, body = _prompt(options.prompt_file, options.chat_file)
    loaded = load_shown(options)
    _check_readable(loaded, prompt, options.chat, options.beyond_positions)
    with Console(stderr=True).status("reading the prompt"):
        found = compress_prompt(
            loaded.model,
            loaded.tokenizer,
            prompt,
            rate=options.rate,
            tokens=options.tokens,
            scorer=chosen,
            chunk_size=options.chunk,
            align=options.align,
            keep=options.keep,
            gap=options.gap,
            chat=options.chat,
        )
    written = _written(found, body, options.request, ids=options.ids)
    if out is None:
        typer.echo(written)
    else:
        write_all(out.parent, {out.name: f"{written}\n".encode()})
    if json_file is not None:
        names = ("model", "rate", "tokens", "chunk", "align")
        settings = {name: getattr(options, name) for name in names}
        data = {"kvpolicy": kvpolicy.__version__, "settings": settings, **found.as_data()}
        write_all(json_file.parent, {json_file.name: as_json(data)})
    errors = plain_console(stderr=True)
    errors.print(found.report())
    for file in (out, json_file):
        if file is not None:
            errors.print(f"written to {file}")


def _scorer(options: CompressOptions) -> PromptScorer:
    if options.scorer is None and options.filter_layer is None:
        given = {"steps": options.look_ahead, "kernel_size": options.pool}
        return LookAheadScorer(**{name: value for name, value in given.items() if value})
    for option, value in (("--look-ahead", options.look_ahead), ("--kernel-size", options.pool)):
        if value is not None:
            raise ValueError(
                f"{option} must not be given with --scorer or --filter-layer, which generate no "
                f"answer, got {value}"
            )
    if options.scorer is None:
        return FilterLayerScorer(filter_layer=options.filter_layer)
    (part,) = chosen_scorers([options.scorer]).values()
    return FilterLayerScorer(part, options.filter_layer)


def _prompt(prompt_file: Path | None, chat_file: Path | None) -> tuple[Any, dict[str, Any]]:
    """Read the prompt; if it came in a request body, also return the body's other fields."""
    if (prompt_file is None) == (chat_file is None):
        got = "neither" if prompt_file is None else "both"
        raise ValueError(f"exactly one of --prompt-file and --chat-file must be given, got {got}")
    if prompt_file is not None:
        return read_prompt(prompt_file), {}
    assert chat_file is not None
    try:
        given = json.loads(read_text(chat_file, "chat file"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"chat file {chat_file} must be JSON, got something else: {error.msg} at line "
            f"{error.lineno}"
        ) from None
    body = given if isinstance(given, dict) else {"messages": given}
    if not isinstance(body.get("messages"), list):
        raise ValueError(
            f'chat file {chat_file} must hold a list of messages, or an object with "messages", '
            "got neither"
        )
    try:
        read_messages(body["messages"])
    except TypeError as error:  # the mistake is in the user's file
        raise ValueError(f"chat file {chat_file}: {error}") from None
    return body["messages"], {key: value for key, value in body.items() if key != "messages"}


def _check_readable(loaded: Loaded, prompt: Any, chat: bool | None, beyond: bool) -> None:
    """Check that the model's vocabulary knows the prompt and its positions suffice for it."""
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
