"""Run `kvpolicy compress`: a small model shortens a prompt for any server to answer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import attrs

from kvpolicy.evaluation.commands.working import work
from kvpolicy.evaluation.defaults import ALIGNMENT_NAMES, COMPRESSION_RATE
from kvpolicy.evaluation.options import (
    CHAT,
    JSON,
    PROMPT,
    ModelOptions,
    Option,
    check_scorers,
)


@attrs.frozen(kw_only=True)
class CompressOptions(ModelOptions):
    """The command-line options of `kvpolicy compress`; its small model chooses what is cut.

    Raises:
        ValueError: The scorer is unknown.
    """

    prompt_file: Annotated[Path | None, Option(PROMPT, metavar="FILE")] = None
    chat_file: Annotated[
        Path | None,
        Option(
            "File with a chat as JSON, instead of --prompt-file: a list of messages, or a "
            'request body with "messages". A message may have "keep": true, false, or a text in '
            "it that is not cut.",
            metavar="FILE",
        ),
    ] = None
    rate: Annotated[
        float | None,
        Option(
            f"Fraction of the chunks to keep, in (0, 1]; default {COMPRESSION_RATE}.",
            ("--rate", "--retention-rate", "-r"),
            metavar="RATE",
        ),
    ] = None
    tokens: Annotated[
        int | None,
        Option("Largest number of tokens to keep, instead of --rate.", min=1),
    ] = None
    chunk: Annotated[int, Option("Number of tokens in a chunk.", ("--chunk-size",), min=1)] = 32
    align: Annotated[
        str, Option(f"Border at which chunks end: {', '.join(ALIGNMENT_NAMES)}.", metavar="NAME")
    ] = "word"
    keep: Annotated[
        tuple[str, ...],
        Option("Text in the prompt that is never cut; repeatable.", metavar="TEXT"),
    ] = ()
    gap: Annotated[str, Option("Text to insert where something was left out.", metavar="TEXT")] = ""
    look_ahead: Annotated[
        int | None,
        Option(
            "Number of answer tokens to generate, whose attention scores the prompt; default 8.",
            min=1,
        ),
    ] = None
    pool: Annotated[
        int | None,
        Option(
            "Width (odd) of the pooling of this attention; default 13.",
            ("--kernel-size",),
            min=1,
        ),
    ] = None
    scorer: Annotated[
        str | None,
        Option("Scorer for --filter-layer: a name, or name:parameter=value,...", metavar="PART"),
    ] = None
    filter_layer: Annotated[
        int | None,
        Option(
            "Score the prompt at this layer, counted from 0, instead of by an answer: with "
            "--scorer, or GemFilter's scorer; default: half depth.",
            min=0,
        ),
    ] = None
    chat: Annotated[bool | None, CHAT] = None
    ids: Annotated[bool, Option("Write the model's token ids as JSON, instead of text.")] = False
    request: Annotated[
        str | None,
        Option(
            "Write a request body as JSON, for an OpenAI-compatible server that serves a model "
            "by this name.",
            metavar="NAME",
        ),
    ] = None
    out: Annotated[
        Path | None,
        Option(
            "File to write to; default: standard output.",
            ("--out-file",),
            metavar="FILE",
        ),
    ] = None
    json_file: Annotated[Path | None, JSON] = None

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        check_scorers([] if self.scorer is None else [self.scorer])


def compress(options: CompressOptions) -> None:
    """Shorten a prompt by the parts that a small local model ignores; nothing is sent anywhere.

    The shorter prompt goes to stdout; a table of what was left out goes to stderr.
    """
    work("compress", options)
