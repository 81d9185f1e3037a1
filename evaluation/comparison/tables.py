"""Build tables of the sweeps and of calibration, 80 columns wide, with their legends."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from rich.table import Table

from kvpolicy.evaluation.calibration.distances import TSPDistances
from kvpolicy.evaluation.comparison.accuracy import Score
from kvpolicy.evaluation.comparison.sweep import RateSweep, Sweep


def sweep_table(sweep: Sweep) -> Table:
    """Return a table of FastKV's accuracy by the layer after which it drops tokens."""
    table = _table()
    table.add_column("TSP layer", justify="right")
    for rate in sweep.scores:
        for kind in sweep.full:
            table.add_column(f"rate {rate:g}\n{kind} %", justify="right", no_wrap=True)
    for layer in range(len(next(iter(sweep.scores.values())))):
        cells = (
            percent(score) for layers in sweep.scores.values() for score in layers[layer].values()
        )
        table.add_row(str(layer), *cells)
    table.add_row("full", *[percent(score) for score in sweep.full.values()] * len(sweep.scores))
    return table


def sweep_legend(sweep: Sweep) -> list[str]:
    """Return the legend for the table of accuracy by the layer after which tokens are dropped."""
    return [
        "FastKV by the layer after which tokens are dropped, and by KV retention rate:",
        f"% answered exactly, of {asked(sweep.full)}.",
    ]


def held_out_table(sweep: Sweep) -> Table:
    """Return a table of accuracy with the calibrated and the best drop layer, by retention rate."""
    table = _table()
    table.add_column("rate", justify="right")
    for which in ("calibrated", "best"):
        table.add_column(f"{which}\nlayer", justify="right", no_wrap=True)
        for kind in sweep.full:
            table.add_column(narrow_header(kind), justify="right", no_wrap=True)
    for each in sweep.held_out:
        table.add_row(
            f"{each.retention_rate:g}",
            str(each.calibrated_layer),
            *(percent(score) for score in each.calibrated.values()),
            str(each.best_layer),
            *(percent(score) for score in each.best.values()),
        )
    return table


def held_out_legend(sweep: Sweep) -> list[str]:
    """Return the legend for the table that compares the calibrated with the best drop layer."""
    assert sweep.calibration is not None
    distances = sweep.calibration.distances
    count = len(distances.input_lengths)
    return [
        f"calibrated: layer chosen of 0 to {distances.layers[-1].tsp_layer} by "
        f"{sweep.calibration.criterion}, on {count} prompt{'s' * (count > 1)} without answers.",
        "best: the most accurate of all layers on the prompts of the table above.",
    ]


def rate_sweep_table(sweep: RateSweep) -> Table:
    """Return a table of FastKV's accuracy: rows for tokens passed on, columns for tokens kept."""
    table = _table()
    table.add_column("", no_wrap=True)
    table.add_column("TSP\nrate", justify="right", no_wrap=True)
    for rate in sweep.retention_rates:
        table.add_column(f"kept\n{rate:g}", justify="right", no_wrap=True)
    for kind, full in sweep.full.items():
        for index, tsp_rate in enumerate(sweep.tsp_rates):
            scores = (sweep.scores.get((tsp_rate, rate)) for rate in sweep.retention_rates)
            cells = ("" if each is None else percent(each[kind]) for each in scores)
            table.add_row("" if index else kind, f"{tsp_rate:g}", *cells)
        table.add_row("", "full", percent(full))
    return table


def rate_sweep_legend(sweep: RateSweep) -> list[str]:
    """Return the legend for the table of accuracy by tokens passed on and tokens kept."""
    return [
        f"FastKV with TSP layer {sweep.tsp_layer} by TSP rate and KV retention rate (kept):",
        f"% answered exactly, of {asked(sweep.full)}.",
    ]


def calibration_table(distances: TSPDistances) -> Table:
    """Return a table of how far the output moves if FastKV drops tokens after each layer."""
    table = _table()
    for header in ("TSP layer", "prefill %", "distance", "normalised", "worst"):
        table.add_column(header, justify="right", no_wrap=True)
    for each in distances.layers:
        table.add_row(
            str(each.tsp_layer),
            f"{100 * each.compute_rate:.1f}",
            *(f"{value:.3g}" for value in (each.squared, each.normalised, each.worst)),
        )
    return table


def calibration_legend(distances: TSPDistances) -> list[str]:
    """Return the legend for the table of how far the output moves by drop layer."""
    lengths = distances.input_lengths
    low, high = min(lengths), max(lengths)
    tokens = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    return [
        f"distance: of the last token's final hidden state, TSP rate {distances.tsp_rate:g}",
        f"against full context, squared; mean over {len(lengths)} "
        f"prompt{'s' * (len(lengths) > 1)} of {tokens} tokens.",
        "normalised: over the squared norm of full context's state; worst: of a prompt.",
        "prefill: layer-tokens computed, of a full prefill's.",
    ]


def percent(score: Score) -> str:
    """Return a score as text in percent, with one decimal."""
    return f"{100 * score.rate:.1f}"


def byte_unit(size: int) -> tuple[str, int]:
    """Return the decimal unit, name and size, that shows a byte count with at most four digits.

    Example:
        >>> byte_unit(999), byte_unit(157_286), byte_unit(1_572_864)
        (('B', 1), ('kB', 1000), ('MB', 1000000))
    """
    power = min(max(len(str(size)) - 1, 0) // 3, 4)
    return ("B", "kB", "MB", "GB", "TB")[power], 1000**power


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")


def narrow_header(kind: str) -> str:
    r"""Return a narrow table header for a kind of prompt: its name broken into lines, and "%".

    Example:
        >>> narrow_header("one-hop"), narrow_header("loop")
        ('one-\nhop %', 'loop\n%')
    """
    broken = kind.replace("-", "-\n").replace(" ", "\n")
    return broken + ("\n%" if kind == broken else " %")


def asked(scores: Mapping[str, Score]) -> str:
    """Return text on how many prompts were asked and how wide their scores' 95% interval is."""
    counts = [score.count for score in scores.values()]
    widest = 100 * fmean(0.98 / count**0.5 for count in counts)
    number = " + ".join(f"{count:,}" for count in counts)
    return f"{number} prompt{'s' * (sum(counts) > 1)} (95% interval ±{widest:.0f})"
