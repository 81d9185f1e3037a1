"""Run `kvpolicy eval`: policies on the tasks of lm-evaluation-harness."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import attrs

from kvpolicy.evaluation.commands.working import work
from kvpolicy.evaluation.options import TSP_LAYER, Option, PolicyOptions
from kvpolicy.evaluation.suite.settings import Settings


@attrs.frozen(kw_only=True)
class EvalOptions:
    """The command-line options of `kvpolicy eval`."""

    settings: Settings
    policies: PolicyOptions
    tsp_layer: Annotated[int | None, TSP_LAYER] = None
    out: Annotated[
        Path, Option("Folder of results; one that is there goes on, or is extended.", metavar="DIR")
    ]


def eval(options: EvalOptions) -> None:
    """Score policies on long-context tasks, at several prompt lengths, against full context.

    Every sample is a line of samples.jsonl as soon as it is answered; the same command goes on
    after a kill, and one with other policies, tasks, lengths or a larger --limit adds to the
    folder. kvpolicy report makes a page of it. Without --policy FastKV.
    """
    work("eval", options)
