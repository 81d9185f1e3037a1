"""Write the report in Markdown: where it was run, and a table with a row for each cell."""

from __future__ import annotations

from collections.abc import Sequence

from kvpolicy.evaluation.suite.folder import Results
from kvpolicy.evaluation.suite.joining import differences
from kvpolicy.evaluation.suite.report.origin import facts_of, sources_of
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
    """Return the machine and the versions, and a table of all cells' results.

    Unfinished cells show their progress.
    """
    sources = sources_of(results)
    facts = [(fact.name, *fact.values) for fact in facts_of(sources)]
    parts = [_table(facts[0], facts[1:], left=len(sources) + 1)]
    unlike = differences(sources)
    if unlike:
        parts.append("".join(f"- {each}\n" for each in ["The folders differ:", *unlike])[2:])
    rows = [_row(figure) for figure in Summary.of(results).figures.values()]
    return "\n".join([*parts, _table(HEADER, rows, left=4)])


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, left: int) -> str:
    """Return a Markdown table whose first columns are aligned left, and the others right."""
    line = tuple("---" if column < left else "---:" for column in range(len(header)))
    written = ((cell.replace("|", "\\|") for cell in row) for row in (header, line, *rows))
    return "".join(f"| {' | '.join(row)} |\n" for row in written)


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
