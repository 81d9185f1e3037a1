"""Do the work of `kvpolicy eval`."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import attrs
from rich.console import Console

from kvpolicy.evaluation.chosen import chosen_variants
from kvpolicy.evaluation.commands.eval import EvalOptions
from kvpolicy.evaluation.commands.terminal import load_quietly, plain_console, progress_shown
from kvpolicy.evaluation.defaults import default_tsp_layer
from kvpolicy.evaluation.suite.report.words import duration
from kvpolicy.evaluation.suite.runner import Listener
from kvpolicy.evaluation.suite.sample import Answer, Cell
from kvpolicy.evaluation.suite.study import check, run

DEFAULT = "fastkv"
RATES = (0.1,)


def run_eval(options: EvalOptions) -> None:
    """Do what `kvpolicy eval` does."""
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
        console.print(
            f"finished answers stay in {out}; run the same command again to continue", style="dim"
        )
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
        there = f", {found} of them finished before" if found else ""
        self.console.print(f"{cell}: {metric} {score:.3f} of {samples}{there}")
        self.console.file.flush()  # flushed, so that a file gets it at once too
