"""Do the work of `kvpolicy compare`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvpolicy.evaluation.commands.compare import CompareOptions
from kvpolicy.evaluation.commands.work.terminal import (
    load_shown,
    plain_console,
    progress_shown,
    show_written,
)
from kvpolicy.evaluation.comparison.latency import Timing
from kvpolicy.evaluation.comparison.layout import Layout, comparison_legend
from kvpolicy.evaluation.comparison.rows import ACCURACY_STAGE, Listener, Row
from kvpolicy.evaluation.comparison.study import (
    Study,
    check,
    check_loaded,
    headline,
    run,
    write,
)
from kvpolicy.evaluation.comparison.tables import (
    held_out_legend,
    held_out_table,
    rate_sweep_legend,
    rate_sweep_table,
    sweep_legend,
    sweep_table,
)
from kvpolicy.evaluation.comparison.variant import Variant


def run_compare(options: CompareOptions) -> None:
    """Do what `kvpolicy compare` does."""
    settings, out = options.settings, options.out
    chosen = check(settings, out)
    loaded = load_shown(settings)
    console = plain_console()
    # Before anything is printed; `run` does it again.
    check_loaded(settings, chosen, loaded)
    for line in headline(settings, loaded):
        console.print(line, style="dim")
    for rule in dict.fromkeys(each.parameters.get("decoding") for each in chosen):
        if rule is not None:
            console.print(f"answers: {rule}", style="dim")
    unbounded = dict.fromkeys(each.name for each in chosen if each.policy.decoding is None)
    if settings.policies.decoding_tokens is not None and unbounded:
        console.print(
            f"answers held whole, for want of a rule: {', '.join(unbounded)}", style="dim"
        )
    stopped: list[Study] = []
    try:
        with progress_shown(console, quiet=ACCURACY_STAGE) as progress:
            study = run(settings, chosen, loaded, progress, Rows(console), stopped.append)
    except BaseException:
        for study in stopped:
            show_and_write(study, out)
        raise
    show_and_write(study, out)


class Rows(Listener):
    """Prints a comparison's table row by row, each policy's when it is done.

    Args:
        console: The console to print to; it must not wrap lines.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.layout: Layout | None = None

    def timed(
        self, variants: Sequence[Variant], timings: Sequence[Timing], kinds: Sequence[str]
    ) -> None:
        """Print the table's header once all policies are timed."""
        self.layout = Layout.of(variants, timings, kinds)
        self._print(["", *self.layout.header], "bold")

    def row(self, row: Row) -> None:
        """Print the table row of a finished policy."""
        assert self.layout is not None
        self._print(self.layout.row(row))

    def _print(self, lines: Sequence[str], style: str | None = None) -> None:
        for line in lines:
            self.console.print(line, style=style)
        # Into a file, too, at once: who waits for the rest can read it.
        self.console.file.flush()


def show_and_write(study: Study, out: Path | None) -> None:
    """Print a finished comparison except its rows, and write it if a folder is given."""
    show(study)
    if out is not None:
        show_written(out, write(study, out))


def show(study: Study) -> None:
    """Print a comparison except its rows: legends, notes and the tables of the sweeps."""
    console = Console(highlight=False, markup=False)
    console.print()
    for line in comparison_legend(study.comparison):
        console.print(line, style="dim")
    for note in study.notes:
        console.print(note)
    if study.sweep is not None:
        _show_table(console, sweep_table(study.sweep), sweep_legend(study.sweep))
    if study.sweep is not None and study.sweep.calibration is not None:
        _show_table(console, held_out_table(study.sweep), held_out_legend(study.sweep))
    if study.rate_sweep is not None:
        table, legend = rate_sweep_table(study.rate_sweep), rate_sweep_legend(study.rate_sweep)
        _show_table(console, table, legend)


def _show_table(console: Console, table: Table, legend: list[str]) -> None:
    console.print()
    console.print(table)
    console.print()
    for line in legend:
        console.print(line, style="dim")
