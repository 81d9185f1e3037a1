"""Draw a folder of answers: the score of each policy in each task, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from kvpolicy.evaluation.pictures import Cell, accuracy_colour, draw_grid, new_figure, png, row_axis
from kvpolicy.evaluation.suite.folder import FULL_CONTEXT
from kvpolicy.evaluation.suite.table import Row

_COLUMN, _COSTS = 0.62, 3.2  # inches of a column, and of the bars beside them


def plot_rows(rows: Sequence[tuple[str, Row]]) -> bytes:
    """Plot a table of scores, in %, and bars of memory and prefill time; return PNG bytes.

    The bars are means over the tasks that full context has answered too, as a fraction of full
    context's.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    policies = list(dict.fromkeys(row.policy for _, row in rows))
    places = list(dict.fromkeys(place for place, _ in rows))
    full = {place: row for place, row in rows if row.policy == FULL_CONTEXT}
    names = max(map(len, policies)) * 0.075
    figure = new_figure(names + _COLUMN * len(places) + _COSTS, len(policies))
    tall = 0.055 * max(map(len, places))  # inches of the columns' names, which stand slanted
    figure.set_figheight(figure.get_figheight() + tall)
    scores, costs = figure.subplots(
        1, 2, sharey=True, width_ratios=(_COLUMN * len(places), _COSTS - 0.4)
    )
    row_axis(scores, policies)
    grid: list[list[Cell]] = [[] for _ in policies]
    for place, row in rows:
        cell = Cell(places.index(place), f"{row.score:.0f}", row.score)
        grid[policies.index(row.policy)].append(cell)
    draw_grid(scores, "score, %", places, grid, accuracy_colour())
    for label in scores.get_xticklabels():
        label.set(rotation=40, ha="left", rotation_mode="anchor")
    for index, policy in enumerate(policies):
        own = [(row, full[place]) for place, row in rows if row.policy == policy and place in full]
        if own:
            held = fmean(row.bytes_held / max(base.bytes_held, 1) for row, base in own)
            spent = fmean(row.prefill_seconds / base.prefill_seconds for row, base in own)
            costs.barh(index + 0.32, held, height=0.3, color="#2171b5")
            costs.barh(index + 0.68, spent, height=0.3, color="#bbbbbb")
    costs.axvline(1, color="black", linewidth=1, linestyle=":")
    costs.set_title("KV held (blue), prefill time (grey)\nfull context = 1", fontsize=9)
    costs.tick_params(left=False, labelleft=False)
    for side in ("top", "right", "left"):
        costs.spines[side].set_visible(False)
    return png(figure)
