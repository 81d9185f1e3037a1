"""Run `kvpolicy eval`: policies on the tasks of lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated

import attrs
from rich.console import Console

from kvpolicy.evaluation.commands.terminal import load_quietly, plain_console, progress_shown
from kvpolicy.evaluation.comparison.chosen import chosen_variants
from kvpolicy.evaluation.models import default_tsp_layer
from kvpolicy.evaluation.options import TSP_LAYER, Option, PolicyOptions
from kvpolicy.evaluation.suite.report.words import duration
from kvpolicy.evaluation.suite.runner import Listener
from kvpolicy.evaluation.suite.sample import Answer, Cell
from kvpolicy.evaluation.suite.study import Settings, check, run

DEFAULT = "fastkv"
RATES = (0.1,)


@attrs.frozen(kw_only=True)
class EvalOptions:
    """The command-line options of `kvpolicy eval`."""

    settings: Settings
    policies: PolicyOptions
    tsp_layer: Annotated[int | None, TSP_LAYER] = None
    out: Annotated[Path, Option("Folder of results; one that was begun goes on.", metavar="DIR")]


def eval(options: EvalOptions) -> None:
    """Score policies on long-context tasks, at several prompt lengths, against full context.

    Every sample is a line of samples.jsonl as soon as it is answered; the same command goes on
    after a kill. kvpolicy report makes a page of the folder. Without --policy FastKV.
    """
    settings, policies, out = options.settings, options.policies, options.out
    check(settings, out)
    if not policies.names and not policies.parts:
        policies = attrs.evolve(policies, names=(DEFAULT,))
    layer = default_tsp_layer(settings.model) if options.tsp_layer is None else options.tsp_layer
    chosen = chosen_variants(policies, RATES, tsp_layer=layer)
    console = plain_console()
    try:
        with progress_shown(console, quiet="done") as progress:
            run(
                settings,
                out,
                chosen=chosen,
                loader=load_quietly,
                progress=progress,
                listener=Rows(console),
            )
    except KeyboardInterrupt:
        console.print(f"what is answered stays in {out}; the same command goes on", style="dim")
        raise
    console.print(f"written to {out}; for a page of it: kvpolicy report {out}")


class Rows(Listener):
    """Prints a line with the score of each finished cell of an evaluation.

    Args:
        console: The console to print to; it must not wrap lines.
    """

    def __init__(self, console: Console) -> None:
        self.console = console

    def finished(self, cell: Cell, answers: Sequence[Answer], found: int) -> None:
        """Print the score of a finished cell: a task at a length under one policy."""
        metric = next(iter(answers[0].scores))
        score = fmean(each.scores[metric] for each in answers)
        seconds = duration(fmean(each.total_seconds for each in answers))
        samples = f"{len(answers)} sample{'s' * (len(answers) > 1)}, {seconds} each"
        there = f", {found} of them there before" if found else ""
        self.console.print(f"{cell}: {metric} {score:.3f} of {samples}{there}")
        self.console.file.flush()  # into a file, too, at once
