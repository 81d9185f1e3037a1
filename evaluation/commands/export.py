"""Run `kvpolicy export`: read a document under a policy, and write it for vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import attrs

from kvpolicy.evaluation.commands.working import work
from kvpolicy.evaluation.options import CHAT, PROMPT, TSP_LAYER, ModelOptions, Option, PolicyOptions


@attrs.frozen(kw_only=True)
class ExportOptions(ModelOptions):
    """The command-line options of `kvpolicy export`."""

    prompt_file: Annotated[Path, Option(PROMPT, metavar="FILE")]
    to: Annotated[
        Path, Option("File to write: DIR/NAME.safetensors; requests use NAME.", metavar="FILE")
    ]
    policies: PolicyOptions
    tsp_rate: Annotated[
        float | None,
        Option(
            "Fraction of the prompt's tokens that later layers read after a drop, in (0, 1].",
            metavar="RATE",
        ),
    ] = None
    tsp_layer: Annotated[int | None, TSP_LAYER] = None
    chat: Annotated[bool | None, CHAT] = None


def export(options: ExportOptions) -> None:
    """Read a document under a policy, and write what is kept of it for a vLLM server.

    Without --policy, ReplayKV is used, which needs no question, and keeps 20% of the document. All
    heads of all layers keep equally many tokens, as vLLM needs it.
    """
    work("export", options)
