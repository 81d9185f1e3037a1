"""Sum up a folder of answers as one table: for the terminal, as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from statistics import fmean, median
from typing import TYPE_CHECKING

import attrs

from kvpolicy.evaluation.intervals import Difference, paired_difference, share_interval
from kvpolicy.evaluation.suite.folder import FULL_CONTEXT, Cell

if TYPE_CHECKING:
    from rich.table import Table

HEADERS = ("policy", "n", "score [95%]", "to full [95%]", "KV MB", "prefill s")
LEGEND = (
    "n: documents. score: their mean, in %. to full: the mean difference from full context",
    "on the same documents, in points. [95%]: intervals. KV: keys and values held after the",
    "prompt. prefill: median of the seconds to read it, which kvpolicy compare measures fairly.",
)


@attrs.frozen
class Row:
    """What one policy scored and cost on a task at one length. A field is a column of the CSV file.

    Args:
        task: The task's name.
        length: See `Cell`.
        asked: ``"later"``, or ``"with"`` the document.
        policy: The policy and its retention.
        metric: The task's main metric.
        n: Documents.
        score: Their mean, in %.
        low: Lower end of its 95% interval (Wilson's, which is too wide for scores between 0 and 1).
        high: Upper end.
        pairs: Documents that full context has answered too.
        difference: The mean of the differences from full context on them; None without any.
        difference_low: Lower end of its 95% interval, see `paired_difference`.
        difference_high: Upper end.
        tokens_seen: Tokens of a prompt, the mean.
        tokens_kept: Tokens kept of it, the mean.
        bytes_held: Bytes of their keys and values, the mean.
        prefill_seconds: Seconds to read a prompt, the median.
        total_seconds: Seconds to read and answer it, the median.
    """

    task: str
    length: int | None
    asked: str
    policy: str
    metric: str
    n: int
    score: float
    low: float
    high: float
    pairs: int
    difference: float | None
    difference_low: float | None
    difference_high: float | None
    tokens_seen: float
    tokens_kept: float
    bytes_held: float
    prefill_seconds: float
    total_seconds: float

    @property
    def texts(self) -> list[str]:
        """The row's cells under `HEADERS`."""
        difference = ""
        if self.difference is not None:
            low, high = self.difference_low, self.difference_high
            difference = f"{self.difference:+.1f} [{low:+.0f}, {high:+.0f}]".replace("-", "−")
        held, seconds = self.bytes_held / 1e6, self.prefill_seconds
        return [
            self.policy,
            f"{self.n:,}",
            f"{self.score:.1f} [{self.low:.0f}, {self.high:.0f}]",
            difference,
            f"{held:,.0f}" if held >= 100 else f"{held:.3g}",
            f"{seconds:.1f}" if seconds >= 10 else f"{seconds:.2g}",
        ]


def rows_of(cells: Sequence[Cell]) -> list[tuple[str, Row]]:
    """Sum up cells, in their order; each row comes with the words for its task and length.

    A metric whose scores exceed 1 anywhere in its task is taken to end at 100.
    """
    best: dict[str, float] = {}
    for cell in cells:
        top = max(next(iter(sample.scores.values())) for sample in cell.samples)
        best[cell.task] = max(best.get(cell.task, 1.0), 100.0 if top > 1 else 1.0)
    full = {cell.place: cell for cell in cells if cell.method == FULL_CONTEXT}
    return [(cell.place, _row(cell, full.get(cell.place), best[cell.task])) for cell in cells]


def _row(cell: Cell, full: Cell | None, best: float) -> Row:
    samples = cell.samples
    metric = next(iter(samples[0].scores))
    score = fmean(each.scores[metric] / best for each in samples)
    low, high = share_interval(score, len(samples))
    pairs: list[tuple[float, float]] = []
    if full is not None and cell.method != FULL_CONTEXT:
        others = {(each.document, each.prompt): each.scores for each in full.samples}
        keys = [(each.document, each.prompt) for each in samples]
        pairs = [
            (100 * each.scores[metric] / best, 100 * others[key][metric] / best)
            for each, key in zip(samples, keys, strict=True)
            if key in others
        ]
    found: Difference | None = None
    if pairs:
        found = paired_difference([own for own, _ in pairs], [it for _, it in pairs], scale=100.0)
    return Row(
        task=cell.task,
        length=cell.length,
        asked="later" if cell.later else "with",
        policy=cell.method,
        metric=metric,
        n=len(samples),
        score=100 * score,
        low=100 * low,
        high=100 * high,
        pairs=len(pairs),
        difference=None if found is None else found.mean,
        difference_low=None if found is None else found.low,
        difference_high=None if found is None else found.high,
        tokens_seen=fmean(each.tokens_seen for each in samples),
        tokens_kept=fmean(each.tokens_kept for each in samples),
        bytes_held=fmean(each.bytes_held for each in samples),
        prefill_seconds=median(each.prefill_seconds for each in samples),
        total_seconds=median(each.total_seconds for each in samples),
    )


def terminal_table(rows: Sequence[tuple[str, Row]]) -> Table:
    """Return the table for a terminal of 80 columns: a block for each task and length."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for index, header in enumerate(HEADERS):
        table.add_column(header, justify="right" if index else "left", no_wrap=index != 0)
    before = None
    for place, row in rows:
        if place != before:
            table.add_row()
            table.add_row(f"{place}: {row.metric}", style="bold")
        table.add_row(*row.texts)
        before = place
    return table


def markdown(rows: Sequence[tuple[str, Row]]) -> str:
    """Return the table as Markdown, with the task in each row."""
    lines = [f"| task | {' | '.join(HEADERS)} |", "| --- | --- " + "| ---: " * 5 + "|"]
    lines += [f"| {place} | {' | '.join(row.texts)} |" for place, row in rows]
    return "\n".join([*lines, "", *LEGEND, ""])


def csv_text(rows: Sequence[tuple[str, Row]]) -> str:
    """Return the rows as CSV, with a header and all digits; what is not known is empty."""
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow([each.name for each in attrs.fields(Row)])
    writer.writerows(attrs.astuple(row) for _, row in rows)
    return written.getvalue()
