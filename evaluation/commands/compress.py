"""Run `kvpolicy compress`: a small model shortens a prompt for any server to answer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import attrs

from kvpolicy.evaluation.commands.working import work
from kvpolicy.evaluation.defaults import ALIGNMENT_NAMES, COMPRESSION_RATE
from kvpolicy.evaluation.options import CHAT, JSON, PROMPT, SCORER, ModelOptions, Option


@attrs.frozen(kw_only=True)
class CompressOptions(ModelOptions):
    """The command-line options of `kvpolicy compress`; its small model chooses what is cut."""

    prompt_file: Annotated[Path | None, Option(PROMPT, metavar="FILE")] = None
    chat_file: Annotated[
        Path | None,
        Option(
            'In its place a chat, JSON: messages, or a request body with "messages". "keep" in a '
            "message: true, false, or the text that is not cut.",
            metavar="FILE",
        ),
    ] = None
    rate: Annotated[
        float | None,
        Option(
            f"Fraction of the chunks that is kept, in (0, 1]; default {COMPRESSION_RATE}.",
            ("--rate", "--retention-rate", "-r"),
            metavar="RATE",
        ),
    ] = None
    tokens: Annotated[
        int | None,
        Option("Tokens that are kept at most, in place of a rate.", min=1),
    ] = None
    chunk: Annotated[
        int, Option("Tokens of a chunk.", ("--chunk-size",), min=1, earlier="--chunk")
    ] = 32
    align: Annotated[
        str, Option(f"Where chunks end: at a {', '.join(ALIGNMENT_NAMES)}.", metavar="NAME")
    ] = "word"
    keep: Annotated[
        tuple[str, ...],
        Option("A part of the prompt that is never cut, repeatable.", metavar="TEXT"),
    ] = ()
    gap: Annotated[str, Option("What stands where something was left out.", metavar="TEXT")] = ""
    look_ahead: Annotated[
        int | None, Option("Decoded tokens whose attention is the score; default 8.", min=1)
    ] = None
    pool: Annotated[
        int | None,
        Option(
            "Odd: it is pooled over N tokens; default 13.",
            ("--kernel-size",),
            min=1,
            earlier="--pool",
        ),
    ] = None
    scorer: Annotated[str | None, SCORER] = None
    filter_layer: Annotated[
        int | None,
        Option(
            "In place of a look-ahead, GemFilter's score, or --scorer's, at this layer from 0; "
            "default: half depth.",
            min=0,
        ),
    ] = None
    chat: Annotated[bool | None, CHAT] = None
    ids: Annotated[bool, Option("Write the model's token ids, JSON, in place of text.")] = False
    request: Annotated[
        str | None,
        Option(
            "Write the body of a request to an OpenAI-compatible server, JSON, that serves a model "
            "by this name.",
            metavar="NAME",
        ),
    ] = None
    out: Annotated[
        Path | None,
        Option(
            "Where to; default: standard output.",
            ("--out-file",),
            metavar="FILE",
            earlier="--out",
        ),
    ] = None
    json_file: Annotated[Path | None, JSON] = None


def compress(options: CompressOptions) -> None:
    """Shorten a prompt by the parts that a small local model ignores; nothing is sent anywhere.

    The shorter prompt goes to stdout, what was left out to stderr.
    """
    work("compress", options)
