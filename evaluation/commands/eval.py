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
        Path,
        Option("Folder for the results; an existing one is continued, or extended.", metavar="DIR"),
    ]


def eval(options: EvalOptions) -> None:
    """Score policies on long-context tasks, at several prompt lengths, against full context.

    Each sample is written to samples.jsonl once it is answered. Run the same command again to
    continue after an interruption. Run it with other policies, tasks, lengths or a larger --limit
    to add to the folder. kvpolicy report turns the folder into a page. Without --policy, FastKV is
    used.
    """
    work("eval", options)
