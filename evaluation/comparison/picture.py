"""Draw the comparison: what its table says, from the numbers of ``compare.json`` alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvpolicy.evaluation.comparison.layout import speed_text
from kvpolicy.evaluation.comparison.shown import Budget, Line, Shown
from kvpolicy.evaluation.pictures import (
    Cell,
    accuracy_colour,
    draw_grid,
    new_figure,
    png,
    row_axis,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Inches: of a policy's name, a budget's column, a chart of bars.
_NAME, _COLUMN, _CHART = 1.6, 0.7, 2.1
_FAST, _SLOW, _HELD, _BASELINE = "#1a7f37", "#8c6bb1", "#4878a8", "#888888"


def plot_comparison(data: Mapping[str, Any], names: Sequence[str] | None = None) -> bytes:
    """Plot what a comparison's table says; return the picture as PNG bytes.

    A row for each policy, in the order of the table. On the left its right answers at every
    budget, then bars: how much of the cache it holds, and how fast it reads and decodes. A speed
    whose rounds disagree has a dash and no bar.

    Args:
        data: As `Comparison.as_data` makes it, or a file of results holds it.
        names: Which policies to draw, full context aside; None for all.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    shown = Shown.of(data)
    lines = [
        line
        for line in shown.lines
        if names is None or line is shown.lines[0] or line.name in names
    ]
    widths = [_COLUMN * max(len(shown.budgets), 2)] + [_CHART] * 3
    figure = new_figure(_NAME + sum(widths), len(lines))
    right, held, prefill, decode = figure.subplots(1, len(widths), sharey=True, width_ratios=widths)
    row_axis(right, [line.name for line in lines])
    columns = [f"keeps\n{each.words}" for each in shown.budgets] or ["all"]
    cells = [_cells(line.right) for line in lines]
    draw_grid(right, "right answers (%)", columns, cells, accuracy_colour())
    at = f", keeping {shown.budget.words}" if shown.budget else ""
    shares = [100 * line.share for line in lines]
    _bars(held, f"cache held (%){at}", shares, [f"{each:.1f}" for each in shares], ())
    for panel, title, speeds in (
        (prefill, "prefill, times as fast", [line.prefill for line in lines]),
        (decode, "decoding, times as fast", [line.decode for line in lines]),
    ):
        _bars(panel, title, speeds, [speed_text(each) for each in speeds], (1.0,))
    model = data["timed_model"] or "the model itself"
    figure.supxlabel(
        f"Right answers: of {shown.prompts} prompts. Cache and speeds: a prompt of "
        f"{data['timed_tokens']:,} tokens, {model}{at};\nspeeds against the model without kvpolicy"
        + ("; -: rounds disagree." if _left_out(lines) else "."),
        fontsize=9,
    )
    return png(figure)


def _cells(found: Mapping[Budget, float]) -> list[Cell]:
    return [
        Cell(column, f"{100 * share:.0f}", 100 * share)
        for column, share in enumerate(found.values())
    ]


def _left_out(lines: Sequence[Line]) -> bool:
    return any(None in (line.prefill, line.decode) for line in lines)


def _bars(
    axes: Axes,
    title: str,
    values: Sequence[float | None],
    texts: Sequence[str],
    marks: Sequence[float],
) -> None:
    """Draw a bar for each row with its number behind it; marks are dotted lines."""
    axes.set_title(f"{title}\n", fontsize=10, pad=8)
    highest = max([*marks, *(value for value in values if value is not None)])
    axes.set_xlim(0, 1.35 * highest)
    axes.tick_params(left=False, bottom=False, labelleft=False, labelbottom=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    for mark in marks:
        axes.axvline(mark, color="grey", linewidth=1.0, linestyle=":")
    for index, (value, text) in enumerate(zip(values, texts, strict=True)):
        length = value or 0.0
        colour = (
            _BASELINE if index == 0 else _HELD if not marks else _FAST if length >= 1 else _SLOW
        )
        axes.barh(index + 0.5, length, height=0.7, color=colour, alpha=0.75)
        axes.text(length + 0.03 * highest, index + 0.5, text, va="center", fontsize=9)
