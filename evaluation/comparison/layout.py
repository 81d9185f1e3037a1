"""Lay out the comparison's table as lines of text, so that each row can be printed when done."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kvpolicy.evaluation.comparison.latency import Phase, Timing
from kvpolicy.evaluation.comparison.rows import Comparison, Row
from kvpolicy.evaluation.comparison.speed import MIN_ROUNDS
from kvpolicy.evaluation.comparison.tables import (
    asked,
    byte_unit,
    narrow_header,
    percent,
    steps_legend,
)
from kvpolicy.evaluation.comparison.variant import Variant
from kvpolicy.evaluation.tasks.prompts import STEPS

# Of the terminal; a policy's name that leaves the numbers no room gets a line of its own.
WIDTH = 80
_SCORE_WIDTH = len("100.0")
# Full context against itself, which is no measurement.
_ONE = "x1   "


@attrs.frozen
class Layout:
    """The column widths of a comparison's table, fixed before the first row is known.

    Args:
        headers: Of every column, with line breaks.
        widths: Of every column.
        unit_bytes: Size of the unit of the column of bytes.
        baseline: Full context's times.
    """

    headers: tuple[str, ...]
    widths: tuple[int, ...]
    unit_bytes: int
    baseline: Timing

    @classmethod
    def of(
        cls, variants: Sequence[Variant], timings: Sequence[Timing], kinds: Sequence[str]
    ) -> Layout:
        """Compute the column widths of a comparison's table from its policies and times."""
        baseline = timings[0]
        assert baseline.held is not None
        unit, unit_bytes = byte_unit(baseline.held.full_bytes)
        headers = (
            "policy",
            "rate",
            *map(narrow_header, kinds),
            "kept",
            f"KV\n{unit}",
            "KV\n%",
            "prefill\nms",
            "\nspeed",
            "decode\nms",
            "\nspeed",
        )
        columns = [
            [variant.name for variant in variants],
            [_rate(variant) for variant in variants],
            *([" " * _SCORE_WIDTH] for _ in kinds),
            *zip(*(_measured(each, baseline, unit_bytes) for each in timings), strict=True),
        ]
        widths = [
            max(map(len, (*header.split("\n"), *cells)))
            for header, cells in zip(headers, columns, strict=True)
        ]
        numbers = sum(widths[1:]) + len(widths) - 1
        widths[0] = max(min(widths[0], WIDTH - numbers), len(headers[0]))
        return cls(headers, tuple(widths), unit_bytes, baseline)

    @property
    def header(self) -> list[str]:
        """Return the lines of the table's header."""
        stacks = [header.split("\n") for header in self.headers]
        height = max(map(len, stacks))
        padded = [[""] * (height - len(stack)) + stack for stack in stacks]
        return [self._line(cells) for cells in zip(*padded, strict=True)]

    def row(self, row: Row) -> list[str]:
        """Return a policy's table row as one line, or as two if its name is long."""
        name = row.variant.name
        cells = [
            _rate(row.variant),
            *map(percent, row.scores.values()),
            *_measured(row.timing, self.baseline, self.unit_bytes),
        ]
        if len(name) <= self.widths[0]:
            return [self._line([name, *cells])]
        return [name, self._line(["", *cells])]

    def _line(self, cells: Sequence[str]) -> str:
        first, *others = zip(cells, self.widths, strict=True)
        aligned = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        return " ".join(aligned).rstrip()


def comparison_table(comparison: Comparison) -> list[str]:
    """Return all lines of a comparison's table: header, and a row for each policy."""
    rows = comparison.rows
    layout = Layout.of(
        [row.variant for row in rows], [row.timing for row in rows], comparison.kinds
    )
    return [*layout.header, *(line for row in rows for line in layout.row(row))]


def comparison_legend(comparison: Comparison) -> list[str]:
    """Return text on what the table's columns mean, and on numbers that all rows share."""
    scores = comparison.rows[0].scores
    exact = [name for name in scores if not name.endswith(STEPS)]
    rounds = len(comparison.baseline.prefill.wall_ms)
    legend = [
        f"{', '.join(exact)}: % answered exactly, of {asked(scores)}.",
        *steps_legend(scores),
        f"kept: of {comparison.timed_tokens:,} tokens, per layer, after prefill. "
        "KV: their bytes, % of full.",
        f"ms: prefill; decode per token; batch 1, median of {rounds} round{'s' * (rounds > 1)}.",
        "speed: x2 = twice as fast as full_context, the model without kvpolicy.",
    ]
    if not all(speed.steady for speed in comparison.speeds):
        legend.append(f"?: rounds disagree, or are fewer than {MIN_ROUNDS}: no speed to rely on.")
    return legend


def _rate(variant: Variant) -> str:
    return "-" if variant.retention_rate is None else f"{variant.retention_rate:g}"


def _measured(timing: Timing, baseline: Timing, unit_bytes: int) -> tuple[str, ...]:
    held, full = timing.held, baseline.held
    assert held is not None
    assert full is not None
    digits = 0 if unit_bytes == 1 or full.full_bytes >= 100 * unit_bytes else 2
    return (
        f"{held.kept:,.0f}",
        f"{held.held_bytes / unit_bytes:.{digits}f}",
        f"{100 * held.share:.1f}",
        *_times(timing.prefill, baseline.prefill),
        *_times(timing.decode, baseline.decode),
    )


def _times(phase: Phase, baseline: Phase) -> tuple[str, str]:
    digits = 2 if phase.median_ms < 10 else 1 if phase.median_ms < 1000 else 0
    speed = _ONE if phase is baseline else phase.speed(baseline).text
    # Room for the mark, so that the digits line up with it and without.
    return f"{phase.median_ms:.{digits}f}", speed if speed.endswith("?") else f"{speed} "
