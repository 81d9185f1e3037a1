"""Sum up a folder of answers as one table (terminal, Markdown, CSV) and one picture."""

import csv
import io
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from kvpolicy.evaluation.defaults import FULL_CONTEXT
from kvpolicy.evaluation.intervals import paired_difference, share_interval
from kvpolicy.evaluation.pictures import Cell as Square
from kvpolicy.evaluation.pictures import accuracy_colour, draw_grid, new_figure, png
from kvpolicy.evaluation.suite.folder import Cell, Sample

HEADERS = ("policy", "n", "score [95%]", "to full [95%]", "KV MB", "prefill s")
LEGEND = (
    "n: documents. score: their mean, in %. to full: the mean difference from full",
    "context on the same documents, in points. KV: keys and values held after the",
    "prompt. prefill: median time to read it; kvpolicy compare measures speed fairly.",
)
_COLUMN, _COSTS = 0.62, 3.2  # inches of a column, and of the bars beside them
Row = dict[str, Any]


def rows_of(cells: Sequence[Cell]) -> list[Row]:
    """Sum up cells, in their order: what each scored and cost, by the columns of the CSV file.

    Scores are means in %, with 95% intervals; costs are means, seconds medians. ``pairs`` counts
    documents that full context has answered too. If a score exceeds 1, the task's best is 100.
    """
    over = {cell.task for cell in cells if max(map(_score, cell.samples)) > 1}
    full = {
        cell.place: {(it.document, it.prompt): _score(it) for it in cell.samples}
        for cell in cells
        if cell.method == FULL_CONTEXT
    }
    return [
        _row(cell, full.get(cell.place, {}), 100.0 if cell.task in over else 1.0) for cell in cells
    ]


def _score(sample: Sample) -> float:
    return next(iter(sample.scores.values()))


def _row(cell: Cell, full: Mapping[tuple[int, str], float], best: float) -> Row:
    samples = cell.samples
    share = cell.mean / best
    low, high = share_interval(share, len(samples))
    pairs = []
    if cell.method != FULL_CONTEXT:
        scores = {(each.document, each.prompt): _score(each) for each in samples}
        pairs = [(scores[key] / best, full[key] / best) for key in scores if key in full]
    found = paired_difference(*zip(*pairs, strict=True)) if pairs else None
    row: Row = {"place": cell.place, "task": cell.task, "length": cell.length}
    row |= {"later": cell.later, "policy": cell.method, "metric": cell.metric, "n": len(samples)}
    row |= {"score": 100 * share, "low": 100 * low, "high": 100 * high, "pairs": len(pairs)}
    for name, part in (("", "mean"), ("_low", "low"), ("_high", "high")):
        row[f"difference{name}"] = None if found is None else 100 * getattr(found, part)
    for name in ("tokens_seen", "tokens_kept", "bytes_held", "prefill_seconds", "total_seconds"):
        middle = median if "seconds" in name else fmean
        row[name] = middle([float(getattr(each, name)) for each in samples])
    return row


def texts_of(row: Row) -> list[str]:
    """Return a row's cells under `HEADERS`."""
    difference = ""
    if row["pairs"]:
        interval = f"[{row['difference_low']:+.0f}, {row['difference_high']:+.0f}]"
        difference = f"{row['difference']:+.1f} {interval}"
    costs = row["bytes_held"] / 1e6, row["prefill_seconds"]
    return [
        row["policy"],
        f"{row['n']:,}",
        f"{row['score']:.1f} [{row['low']:.0f}, {row['high']:.0f}]",
        difference,
        *(f"{it:,.0f}" if it >= 100 else f"{it:.3g}" for it in costs),
    ]


def lines_of(rows: Sequence[Row]) -> list[str]:
    """Return the table's lines for a terminal of 80 columns: a block for each task and length."""
    texts = [list(HEADERS), *map(texts_of, rows)]
    widths = [max(len(each[index]) for each in texts) for index in range(len(HEADERS))]

    def line(cells: Sequence[str]) -> str:
        padded = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return " ".join([cells[0].ljust(widths[0]), *padded]).rstrip()

    found, before = [line(HEADERS)], ""
    for row in rows:
        if row["place"] != before:
            found += ["", f"{row['place']}: {row['metric']}"]
        found.append(line(texts_of(row)))
        before = row["place"]
    return [*found, "", *LEGEND]


def markdown(rows: Sequence[Row]) -> str:
    """Return the table as Markdown, with the task in each row."""
    lines = [f"| task | {' | '.join(HEADERS)} |", "| --- | --- " + "| ---: " * 5 + "|"]
    lines += [f"| {row['place']} | {' | '.join(texts_of(row))} |" for row in rows]
    return "\n".join([*lines, "", *LEGEND, ""])


def csv_text(rows: Sequence[Row]) -> str:
    """Return the rows as CSV, with a header and all digits; what is not known is empty."""
    written = io.StringIO()
    writer = csv.DictWriter(written, [*rows[0]][1:], extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return written.getvalue()


def plot_rows(rows: Sequence[Row]) -> bytes:
    """Plot scores in %, and mean memory and prefill time as fractions of full context's, as PNG."""
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    places = list(dict.fromkeys(row["place"] for row in rows))
    full = {row["place"]: row for row in rows if row["policy"] == FULL_CONTEXT}
    grid: dict[str, list[Square]] = {policy: [] for policy in policies}
    for row in rows:
        cell = Square(places.index(row["place"]), f"{row['score']:.0f}", row["score"])
        grid[row["policy"]].append(cell)
    wide = max(1.5, _COLUMN * len(places))
    figure = new_figure(0.075 * max(map(len, policies)) + wide + _COSTS, len(policies))
    figure.set_figheight(figure.get_figheight() + 0.055 * max(map(len, places)))
    scores, costs = figure.subplots(1, 2, sharey=True, width_ratios=(wide, _COSTS - 0.4))

    draw_grid(scores, "score, %", places, grid, accuracy_colour())
    for label in scores.get_xticklabels():
        label.set(rotation=40, ha="left", rotation_mode="anchor")
    for index, policy in enumerate(policies):
        own = [row for row in rows if row["policy"] == policy and row["place"] in full]
        for name, where, colour in (
            ("bytes_held", 0.32, "#2171b5"),
            ("prefill_seconds", 0.68, "#bbbbbb"),
        ):
            shares = [row[name] / max(full[row["place"]][name], 1e-9) for row in own]
            costs.barh(index + where, fmean(shares or [0.0]), height=0.3, color=colour)
    costs.axvline(1, color="black", linewidth=1, linestyle=":")
    costs.set_title("KV held (blue), prefill time (grey)\nfull context = 1", fontsize=9)
    costs.tick_params(left=False, labelleft=False)
    costs.spines[["top", "right", "left"]].set_visible(False)
    return png(figure)
