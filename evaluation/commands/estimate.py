"""Run `kvpolicy estimate`: what policies cost on a prompt, before anything is run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import attrs

from kvpolicy.evaluation.commands.working import work
from kvpolicy.evaluation.defaults import DTYPE_NAMES, ESTIMATED_ANSWER
from kvpolicy.evaluation.estimate.presets import PRESETS
from kvpolicy.evaluation.options import JSON, Option, PolicyOptions


@attrs.frozen(kw_only=True)
class EstimateOptions:
    """The command-line options of `kvpolicy estimate`."""

    config: Annotated[
        str,
        Option(
            f"The model: {', '.join(PRESETS)}, the Hub name of one of these, a folder with a "
            "config.json, the file itself, or the Hub name of a model in the local cache.",
            metavar="NAME",
        ),
    ]
    context: Annotated[int, Option("Number of tokens in the prompt.", min=1)]
    policies: PolicyOptions
    dtype: Annotated[
        str,
        Option(
            f"Number format of weights, keys and values: {', '.join(DTYPE_NAMES)}.", metavar="NAME"
        ),
    ] = "bfloat16"
    answer: Annotated[
        int, Option("Number of tokens in the answer.", ("--answer-tokens",), min=1)
    ] = ESTIMATED_ANSWER
    json_file: Annotated[Path | None, JSON] = None


def estimate(options: EstimateOptions) -> None:
    """Estimate policies' prefill compute and the bytes that they hold, without a run.

    It needs neither weights nor a network. Without --policy, all policies are estimated, at the
    papers' rates 0.1 and 0.2.
    """
    work("estimate", options)
