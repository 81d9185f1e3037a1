"""Run `kvpolicy serve-check`: which exported documents a model can serve, and what they take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import attrs

from kvpolicy.evaluation.commands.sizes import parse_size
from kvpolicy.evaluation.commands.working import work
from kvpolicy.evaluation.options import MODEL, Option


@attrs.frozen(kw_only=True)
class ServeCheckOptions:
    """The command-line options of `kvpolicy serve-check`."""

    folder: Annotated[
        Path, Option("Folder of the exported documents.", metavar="DIR", positional=True)
    ]
    model: Annotated[str, Option(MODEL, metavar="NAME")]
    dtype: Annotated[
        str,
        Option("Number format of the served model; auto: the checkpoint's own.", metavar="NAME"),
    ] = "auto"
    memory: Annotated[
        int,
        Option(
            "Memory for vLLM's blocks, without the weights: 40GB, 24GiB.",
            metavar="SIZE",
            read=parse_size,
        ),
    ] = 16 * 2**30
    answer: Annotated[int, Option("Number of tokens in a question and its answer.", min=1)] = 1024
    block: Annotated[int, Option("Number of tokens in a block of vLLM.", min=1)] = 16


def serve_check(options: ServeCheckOptions) -> None:
    """Show which documents fit a model, the memory of a session, and how many sessions fit."""
    work("serve_check", options)
