"""Write the report as a Markdown table with a row for each cell."""

from __future__ import annotations

from kvpolicy.evaluation.suite.folder import Results
from kvpolicy.evaluation.suite.report.words import duration, memory, spread, unfinished
from kvpolicy.evaluation.suite.summary import Figure, Summary

HEADER = (
    "task",
    "tokens",
    "question",
    "method",
    "score %",
    "to full context [95%]",
    "kept",
    "KV memory",
    "prefill",
    "in all",
    "samples",
)


def markdown(results: Results) -> str:
    """Return a Markdown table of all cells' results; unfinished ones show their progress."""
    rows = [HEADER, tuple("---" if column < 4 else "---:" for column in range(len(HEADER)))]
    rows += [_row(figure) for figure in Summary.of(results).figures.values()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(figure: Figure) -> tuple[str, ...]:
    cell, cost = figure.cell, figure.cost
    length = "" if cell.length is None else f"{cell.length:,}"
    named = (cell.task, length, cell.question, cell.method)
    if cost is None or figure.score is None:
        return (*named, "unfinished", *[""] * 5, unfinished(figure))
    return (
        *named,
        f"{figure.score:.1f}",
        spread(figure.difference) or "",
        f"{cost.tokens_kept:,.0f}",
        memory(cost.bytes_held),
        duration(cost.prefill_seconds),
        duration(cost.total_seconds),
        str(figure.done),
    )
