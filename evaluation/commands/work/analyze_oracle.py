"""Run `kvpolicy analyze --oracle`: how well scorers rank what an answer will attend to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvpolicy.assignments import PartOption
from kvpolicy.evaluation.analysis.oracle import TOP_SHARE, Ranking
from kvpolicy.evaluation.analysis.oracle_study import (
    OracleSettings,
    OracleStudy,
    check_oracle,
    run_oracle,
    write_oracle,
)
from kvpolicy.evaluation.commands.terminal import load_shown, progress_bar, show_written
from kvpolicy.interfaces import Scorer
from kvpolicy.registry import check_names, name_of, registered

# Number of layers beside a scorer's name, so that a table fits 80 columns.
MAX_COLUMNS = 8


def analyze_oracle(settings: OracleSettings, names: Sequence[str], out: Path | None) -> None:
    """Run a study that compares scorers with the answer's own attention, and print it."""
    scorers = chosen_scorers(names)
    texts = check_oracle(settings, out)
    loaded = load_shown(settings.analysis)
    with progress_bar() as progress:
        study = run_oracle(settings, texts, loaded, scorers, progress)
    show(study)
    if out is not None:
        show_written(out, write_oracle(study, out))


def chosen_scorers(names: Sequence[str]) -> dict[str, Scorer]:
    """Build the scorers named on the command line, keyed by their option text.

    Args:
        names: Each a registered name, or ``name:parameter=value,...``; none for all registered.

    Raises:
        ValueError: A name is unknown, or a parameter is none of the scorer's.
    """
    known = registered("scorer")
    scorers: dict[str, Scorer] = {}
    parsed = {written: PartOption.parse(written, "--scorer") for written in names or known}
    check_names({"scorer": [asked.name for asked in parsed.values()]})
    for written, asked in parsed.items():
        try:
            part = known[name_of(asked.name, "scorer")](**asked.parameters)
        except TypeError as error:
            raise ValueError(f"--scorer {written}: {error}") from error
        assert isinstance(part, Scorer)
        scorers[written] = part
    return scorers


def show(study: OracleStudy) -> None:
    """Print a study's two tables of scorers by layer, their legend and the notes."""
    console = Console(highlight=False, markup=False)
    share = round(100 * TOP_SHARE)
    correlation = _tables(study, "rho", lambda each: each.spearman, 1.0)
    found = _tables(study, f"top {share}% found", lambda each: each.found, 100.0)
    for table in (*correlation, *found):
        console.print(table)
        console.print()
    count, kernel = len(study.lengths), study.settings.kernel_size
    console.print(
        "Reference: the attention that the answer with full context gives each token, in the "
        "layer and head that give it most, averaged over the answer's tokens, pooled over "
        f"{kernel}. rho: Spearman's correlation of a scorer's saliency at a layer, over all "
        f"heads, with the reference. found: share of the reference's top {share}% of tokens that "
        f"are also in the scorer's top {share}% ({share}% by chance). Means over {count} "
        f"prompt{'s' * (count > 1)} of {_span(study.lengths)} tokens with answers of "
        f"{_span(study.answers)}; the last {study.settings.analysis.window_size} tokens are not "
        "ranked.",
        style="dim",
    )
    for note in study.notes:
        console.print(note)


def _tables(
    study: OracleStudy, title: str, values: Callable[[Ranking], dict[int, float]], unit: float
) -> list[Table]:
    """Return tables with a row per scorer and a column per layer, split to fit the terminal."""
    tables = []
    layers = study.layers
    for first in range(0, len(layers), MAX_COLUMNS):
        shown = layers[first : first + MAX_COLUMNS]
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column(f"{title}\nby layer", overflow="fold")
        for layer in shown:
            table.add_column(f"\n{layer}", justify="right", no_wrap=True)
        for name, ranking in study.rankings.items():
            row = values(ranking)
            cells = (f"{unit * row[layer]:.{2 if unit == 1 else 0}f}" for layer in shown)
            table.add_row(name, *cells)
        tables.append(table)
    return tables


def _span(lengths: Sequence[int]) -> str:
    low, high = min(lengths), max(lengths)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
