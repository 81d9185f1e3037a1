"""Tables of a comparison for an 80-column terminal, each with a legend below."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean

from rich.table import Table

from kvpolicy.evaluation.accuracy import Score
from kvpolicy.evaluation.comparison import Comparison
from kvpolicy.evaluation.latency import Phase
from kvpolicy.evaluation.sweep import Sweep


def comparison_table(comparison: Comparison) -> Table:
    """A row for each policy."""
    table = _table()
    first = comparison.rows[0].timing.held
    assert first is not None
    unit, unit_bytes = byte_unit(first.full_bytes)
    table.add_column("policy", overflow="fold")
    for header in (
        "rate",
        *(_in_two_lines(kind) for kind in comparison.kinds),
        "kept",
        f"KV\n{unit}",
        "KV\n%",
        "prefill\nms",
        "\nspeed",
        "decode\nms",
        "\nspeed",
    ):
        table.add_column(header, justify="right", no_wrap=True)
    for row in comparison.rows:
        held = row.timing.held
        assert held is not None
        rate = row.variant.retention_rate
        table.add_row(
            row.variant.name,
            "-" if rate is None else f"{rate:g}",
            *(percent(score) for score in row.scores.values()),
            f"{held.kept:,.0f}",
            f"{held.held_bytes / unit_bytes:.{0 if unit_bytes == 1 else 2}f}",
            f"{100 * held.share:.1f}",
            *_times(row.timing.prefill, comparison.baseline.prefill),
            *_times(row.timing.decode, comparison.baseline.decode),
        )
    return table


def comparison_legend(comparison: Comparison) -> list[str]:
    """What the columns are, with the numbers that all rows share."""
    scores = comparison.rows[0].scores
    seen = f"{comparison.timed_tokens:,}"
    before = comparison.baseline
    rounds = len(before.prefill.wall_ms)
    return [
        f"{', '.join(scores)}: % answered exactly, of {_asked(scores.values())}.",
        f"kept: of {seen} tokens, per layer, after prefill. KV: their bytes, % of full.",
        f"ms: prefill; decode per token; batch 1, median of {rounds} round{'s' * (rounds > 1)}.",
        f"speed: x2 = twice as fast as the model without kvpolicy ({before.prefill.median_ms:.1f}, "
        f"{before.decode.median_ms:.2f} ms).",
    ]


def sweep_table(sweep: Sweep) -> Table:
    """A row for each TSP layer, full context last."""
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
    """What the sweep's table is."""
    return [
        "FastKV by the layer after which tokens are dropped, and by KV retention rate:",
        f"% answered exactly, of {_asked(sweep.full.values())}.",
    ]


def percent(score: Score) -> str:
    """A score in percent, with one decimal."""
    return f"{100 * score.rate:.1f}"


def byte_unit(size: int) -> tuple[str, int]:
    """The decimal unit in which a number of bytes has at most four digits, and its size.

    Example:
        >>> byte_unit(999), byte_unit(157_286), byte_unit(1_572_864)
        (('B', 1), ('kB', 1000), ('MB', 1000000))
    """
    power = min(max(len(str(size)) - 1, 0) // 3, 4)
    return ("B", "kB", "MB", "GB", "TB")[power], 1000**power


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")


def _times(phase: Phase, baseline: Phase) -> tuple[str, str]:
    digits = 2 if phase.median_ms < 10 else 1 if phase.median_ms < 1000 else 0
    return f"{phase.median_ms:.{digits}f}", f"x{phase.speedup(baseline):.2f}"


def _in_two_lines(kind: str) -> str:
    """A kind of prompt as a narrow header: "one-hop" becomes "one-" over "hop %"."""
    return kind.replace("-", "-\n").replace(" ", "\n") + " %"


def _asked(scores: Iterable[Score]) -> str:
    """How many prompts were asked, and half the widest 95% interval of their score."""
    counts = [score.count for score in scores]
    widest = 100 * fmean(0.98 / count**0.5 for count in counts)
    number = " + ".join(f"{count:,}" for count in counts)
    return f"{number} prompt{'s' * (sum(counts) > 1)} (95% interval ±{widest:.0f})"
