"""Do the work of `kvpolicy compare`."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill

from rich.console import Console
from rich.table import Table

from kvpolicy.evaluation.commands.compare import CompareOptions
from kvpolicy.evaluation.commands.terminal import (
    load_shown,
    plain_console,
    progress_shown,
    show_written,
)
from kvpolicy.evaluation.comparison.layout import WIDTH, comparison_legend, comparison_table
from kvpolicy.evaluation.comparison.sentences import sentences
from kvpolicy.evaluation.comparison.shown import Shown
from kvpolicy.evaluation.comparison.study import (
    Study,
    asked,
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
        with progress_shown(console) as progress:
            study = run(settings, chosen, loaded, progress, stopped.append)
    except BaseException:
        for study in stopped:
            show_and_write(study, out)
        raise
    show_and_write(study, out)


def show_and_write(study: Study, out: Path | None) -> None:
    """Print a comparison, and write it if a folder is given."""
    show(study)
    if out is not None:
        show_written(out, write(study, out))


def show(study: Study) -> None:
    """Print a comparison: its table, legend, notes, what it shows, and the sweeps' tables."""
    console = Console(highlight=False, markup=False)
    data = study.comparison.as_data()
    shown = Shown.of(data)
    console.print()
    for index, line in enumerate(comparison_table(shown)):
        console.print(line, style="bold" if index < 2 else None, soft_wrap=True)
    console.print()
    prompts = asked(study.settings, shown.prompts)
    for line in (*comparison_legend(shown, data, prompts), *study.notes):
        console.print(fill(line, WIDTH), style="dim")
    console.print()
    for sentence in sentences(shown):
        console.print(fill(sentence, WIDTH))
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
