"""Draw the comparison: grids of accuracy by rate, and beside them the speeds.

Made from the numbers of ``compare.json`` alone, so that a file can be drawn again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from kvpolicy.evaluation.comparison.speed import MIN_ROUNDS, Speed
from kvpolicy.evaluation.pictures import (
    Cell,
    accuracy_colour,
    draw_grid,
    new_figure,
    png,
    row_axis,
)
from kvpolicy.evaluation.tasks.prompts import STEPS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Speeds are shown at one rate, the one nearest the paper's first.
_SPEED_RATE = 0.1
_PHASES = {"prefill": "prefill", "decode": "decoding"}
# Inches: of a policy's name, a rate's column, a chart of speeds.
_NAME, _COLUMN, _CHART = 1.9, 0.55, 1.9


def plot_comparison(data: Mapping[str, Any]) -> bytes:
    """Plot a comparison's accuracy and speed; return the picture as PNG bytes.

    A row for each policy, full context first and the others by their accuracy. On the left a grid
    for each kind of prompt, a column for each rate; a policy without a rate has one wide cell. On
    the right the speed of prefill and decoding against full context, with the interval of the
    median; hollow, with a question mark, where the rounds do not agree.

    Args:
        data: As `Comparison.as_data` makes it, or a file of results holds it.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    policies = _by_accuracy(data["rows"])
    kinds, exact = list(_scores(data["rows"][0])), data["rows"][0]["exact_match"]
    rates = sorted({row["retention_rate"] for row in data["rows"]} - {None})
    columns = [f"{rate:.0%}" if rate >= 0.01 else f"{rate:.1%}" for rate in rates] or ["all"]
    grid_width = _COLUMN * max(len(columns), 2)
    widths = [*[grid_width] * len(kinds), *[_CHART] * len(_PHASES)]
    figure = new_figure(_NAME + sum(widths) + 0.6, len(policies))
    axes = figure.subplots(1, len(widths), sharey=True, squeeze=False, width_ratios=widths)[0]
    row_axis(axes[0], [_name(rows) for rows in policies])
    for kind, each in zip(kinds, axes, strict=False):
        cells = [_cells(rows, kind, rates) for rows in policies]
        draw_grid(each, _title(kind), columns, cells, accuracy_colour())
    shown = [_shown(rows) for rows in policies]
    at = min(rates, key=lambda rate: abs(rate - _SPEED_RATE), default=None)
    for (phase, words), each in zip(_PHASES.items(), axes[len(kinds) :], strict=True):
        rate = "" if at is None else f", {at:.0%} kept"
        each.set_title(f"{words}{rate}\n", fontsize=10, pad=8)
        _speeds(each, [_speed(row[phase]) for row in shown])
    figure.supxlabel(
        "left: % answered exactly, by share of the tokens kept; right: times as fast as\n"
        "full_context, the model without kvpolicy, and the 90% interval of that median;\n"
        f"hollow and ?: rounds disagree, or are fewer than {MIN_ROUNDS}, no speed to rely on"
        + ("\nsteps: of an answer before its first wrong one" if len(kinds) > len(exact) else ""),
        fontsize=8,
    )
    return png(figure)


def _by_accuracy(rows: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Group a comparison's rows by policy, full context first, then by falling accuracy."""
    first = rows[0]["policy"]

    def key(row: Mapping[str, Any]) -> tuple[object, ...]:
        """Return a key that is equal for rows which the plot joins by one line."""
        rate = row["retention_rate"]
        return (row["policy"], row["tokens"]["kept"] if rate is None else None)

    policies = [[row for row in rows if key(row) == each] for each in dict.fromkeys(map(key, rows))]

    def rank(found: Sequence[Mapping[str, Any]]) -> tuple[bool, float]:
        scores = [score["rate"] for row in found for score in _scores(row).values()]
        return found[0]["policy"] != first, -fmean(scores)

    return sorted(policies, key=rank)


def _scores(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's scores by name: exact answers per kind of prompt, and steps if counted."""
    steps = row.get("right_steps", {})
    return {**row["exact_match"], **{kind + STEPS: score for kind, score in steps.items()}}


def _title(kind: str) -> str:
    """Return a plot column's title, broken into two short lines."""
    if kind.endswith(STEPS):
        return f"{kind.removesuffix(STEPS)}\n% steps"
    return f"{kind}\n% exact" if "exact" not in kind else f"{kind}\n%"


def _name(rows: Sequence[Mapping[str, Any]]) -> str:
    row = rows[0]
    kept = row["tokens"]["kept"] / row["tokens"]["seen"]
    if row["retention_rate"] is not None or kept == 1:
        return str(row["policy"])
    return f"{row['policy']} (keeps {kept:.0%})"


def _cells(rows: Sequence[Mapping[str, Any]], kind: str, rates: Sequence[float]) -> list[Cell]:
    found = []
    for row in rows:
        score = 100 * _scores(row)[kind]["rate"]
        rate = row["retention_rate"]
        column, span = (0, max(len(rates), 1)) if rate is None else (rates.index(rate), 1)
        found.append(Cell(column, f"{score:.0f}", score, span))
    return found


def _shown(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return a policy's row with the retention rate nearest to the one speeds are shown for."""
    return min(rows, key=lambda row: abs((row["retention_rate"] or 0) - _SPEED_RATE))


def _speed(phase: Mapping[str, Any]) -> Speed | None:
    rounds = phase.get("rounds_speedup")
    return None if rounds is None else Speed(tuple(rounds))


def _speeds(axes: Axes, speeds: Sequence[Speed | None]) -> None:
    """Plot each row's speed as a dot with an interval; the first row is the baseline."""
    highest = max([1.0, *(speed.median for speed in speeds[1:] if speed)])
    axes.set_xlim(0, 1.3 * highest)
    axes.axvline(1.0, color="grey", linewidth=1.0, linestyle=":")
    axes.tick_params(left=False, labelleft=False, labelsize=8)
    axes.grid(axis="x", alpha=0.3)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    for index, speed in enumerate(speeds):
        height = index + 0.5
        # The baseline is 1 by definition, whatever a file says of how it was measured.
        text = "1" if index == 0 or speed is None else speed.text.removeprefix("x")
        axes.text(1.02, height, text, transform=axes.get_yaxis_transform(), va="center", fontsize=9)
        if index == 0 or speed is None:
            continue
        if speed.interval is not None:
            axes.plot(speed.interval, [height] * 2, color="C0", linewidth=2.0, alpha=0.5)
        face = "C0" if speed.steady else "white"
        axes.plot(speed.median, height, marker="o", color="C0", markerfacecolor=face)
