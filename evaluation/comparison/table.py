"""Write a comparison as a table for an 80-column terminal, and say in words what is clear."""

from collections.abc import Sequence

from rich.table import Table

from kvpolicy.evaluation.cells import Cell
from kvpolicy.evaluation.comparison.study import Comparison, Row
from kvpolicy.evaluation.variant import Variant

# Kinds that get a column of their own; more are only in the file of results.
_MOST_KINDS = 4


def budget_of(variant: Variant) -> str:
    """Return the words for what a policy keeps; empty for one without a budget."""
    if variant.retention_tokens is not None:
        return f"{variant.retention_tokens:,} tokens"
    return "" if variant.retention_rate is None else f"{100 * variant.retention_rate:.3g}%"


def name_of(variant: Variant) -> str:
    """Return a policy's name, with the layer of its drop if the comparison has set one."""
    layer = variant.parameters.get("tsp_layer")
    return variant.name if layer is None else f"{variant.name} @{layer}"


def grouped(found: Comparison) -> dict[str, list[Row]]:
    """Return the rows by their budget's words; full context is the first group, with ''."""
    groups: dict[str, list[Row]] = {}
    for row in found.rows:
        groups.setdefault(budget_of(row.variant), []).append(row)
    return groups


def comparison_table(found: Comparison) -> Table:
    """Return the table: a block for each budget, a row for each policy."""
    kinds = list(found.full.kinds)
    shown = kinds if 1 < len(kinds) <= _MOST_KINDS else []
    scored = found.full.total.score is not None
    timed = any(row.times is not None for row in found.rows)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("\npolicy", no_wrap=True)
    headers = []
    if scored:
        headers.append(f"right\nof {found.questions}")
        counts = {kind: found.full.kinds[kind].count for kind in shown}
        headers += [f"{kind}\nof {counts[kind]}" for kind in shown]
    headers += ["nats\nlost", "KV\n%"]
    if timed:
        headers += ["prefill\ntime", "decode\ntime"]
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    groups = grouped(found)
    for budget, rows in groups.items():
        if budget:
            table.add_section()
            table.add_row()
            table.add_row(f"keeping {budget}", style="bold")
        for row in rows:
            cells = [name_of(row.variant)]
            if scored:
                cells += [_right(each) for each in (row.total, *(row.kinds[it] for it in shown))]
            lost = found.lost(row)
            cells += ["" if row is found.full else f"{lost:.2f}", f"{100 * row.total.held:.1f}"]
            if timed:
                cells += [_time(found, row, what) for what in ("prefill", "decode")]
            table.add_row(*cells)
    return table


def _right(cell: Cell) -> str:
    return "" if cell.score is None else f"{round(cell.score * cell.count, 1):g}"


def _time(found: Comparison, row: Row, what: str) -> str:
    full = found.full.times
    if row.times is None or full is None:
        return ""
    return "1" if row is found.full else row.times.ratio(full, what).text


def legend(found: Comparison) -> list[str]:
    """Return lines on what the table's columns mean."""
    lines = [
        "nats lost: how much less probable each token of the right answer is than with",
        "full context. KV: bytes of keys and values held after the prompt, of full context's.",
    ]
    if any(row.times is not None for row in found.rows):
        said = "Times: of full context without kvpolicy, median; at the policy's largest budget."
        lines.append(said)
        if any("?" in _time(found, row, it) for row in found.rows for it in ("prefill", "decode")):
            lines.append("?: the rounds disagree; measure on an idle machine.")
    return lines


def sentences(found: Comparison) -> list[str]:
    """Return, for each budget, which policies differ from full context and which do not."""
    said = []
    for budget, rows in grouped(found).items():
        clear = [row for row in rows if _clear(row)]
        ties = [row for row in rows if row.difference is not None and not _clear(row)]
        if not budget or not (clear or ties):
            continue
        what = "right answers" if found.full.total.score is not None else "probability"
        parts = []
        if clear:
            parts.append(
                f"clearly less {what}: {_names(clear)}".replace("less right", "fewer right")
            )
        if ties:
            parts.append(f"no clear difference from full context: {_names(ties)}")
        said.append(f"Keeping {budget}, {'; '.join(parts)}.")
    return said


def _clear(row: Row) -> bool:
    """True if the paired 95% interval of a row's difference lies below 0."""
    if row.difference is None:
        return False
    if row.difference.scores is not None:
        return row.difference.scores.high < 0
    interval = row.difference.log_prob_interval
    return interval is not None and interval[1] < 0


def _names(rows: Sequence[Row]) -> str:
    return ", ".join(name_of(row.variant) for row in rows)
