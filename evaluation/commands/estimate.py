"""Run `kvpolicy estimate`: what policies cost on a prompt, before anything is run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import attrs

from kvpolicy.evaluation.commands.memory_options import MemoryOptions
from kvpolicy.evaluation.commands.working import work
from kvpolicy.evaluation.cost.presets import PRESETS
from kvpolicy.evaluation.defaults import DTYPE_NAMES
from kvpolicy.evaluation.options import JSON, Option, PolicyOptions


@attrs.frozen(kw_only=True)
class EstimateOptions:
    """The command-line options of `kvpolicy estimate`."""

    config: Annotated[
        str,
        Option(
            f"{', '.join(PRESETS)}, such a model's name on the Hub, a folder with a config.json, "
            "such a file, or any name on the Hub that the local cache holds.",
            metavar="NAME",
        ),
    ]
    context: Annotated[int, Option("Tokens of the prompt.", min=1)]
    policies: PolicyOptions
    dtype: Annotated[
        str, Option(f"Of weights, keys and values: {', '.join(DTYPE_NAMES)}.", metavar="NAME")
    ] = "bfloat16"
    memory: MemoryOptions
    json_file: Annotated[Path | None, JSON] = None


def estimate(options: EstimateOptions) -> None:
    """Estimate policies' compute and memory for a prompt, without weights and without a run.

    Without --policy all policies, at the paper's rates 0.1 and 0.2. With --memory also how many
    sessions fit, layers bounded to what is kept of the prompt if not to --decoding-tokens.
    """
    work("estimate", options)
