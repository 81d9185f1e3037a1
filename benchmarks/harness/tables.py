"""Print tables of results, one line for each row of a record."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import attrs

Row = dict[str, Any]


@attrs.frozen
class Column:
    """One column of a table: a key of the row or a function of it; None is shown as a dash.

    A negative width aligns the cells to the left.
    """

    title: str
    width: int
    value: str | Callable[[Row], Any]
    form: str = ""

    def head(self) -> str:
        return self._placed(self.title)

    def cell(self, row: Row) -> str:
        found = row.get(self.value) if isinstance(self.value, str) else self.value(row)
        return self._placed("-" if found is None else format(found, self.form))

    def _placed(self, text: str) -> str:
        return text.ljust(-self.width) if self.width < 0 else text.rjust(self.width)


class Table:
    """A table of one part of a benchmark's record.

    Args:
        part: The part's name, whose value is a list of rows.
        columns: The columns from left to right.
        instead: Returns the text of a row that the columns do not fit, such as one that failed;
            None for other rows.
        live: Whether rows are printed as they are measured, instead of at the end.
        gap: Whether an empty line comes before the table.
    """

    def __init__(
        self,
        part: str,
        *columns: Column,
        instead: Callable[[Row], str | None] = lambda row: None,
        live: bool = True,
        gap: bool = False,
    ) -> None:
        self.part, self.columns, self.instead = part, columns, instead
        self.live, self.gap = live, gap

    @property
    def header(self) -> str:
        return "\n" * self.gap + "".join(each.head() for each in self.columns).rstrip()

    def line(self, row: Row) -> str:
        found = self.instead(row)
        if found is not None:
            return found
        return "".join(each.cell(row) for each in self.columns).rstrip()

    def text(self, record: dict[str, Any]) -> str:
        return "\n".join([self.header, *map(self.line, record[self.part])])


class Text:
    """A text, made from a record, that is printed after its tables."""

    live = False

    def __init__(self, text: Callable[[dict[str, Any]], str]) -> None:
        self.text = text


def middle(key: str, unit: float = 1.0) -> Callable[[Row], float]:
    """Return a column function: the median of a row's list of numbers, in a unit."""
    return lambda row: median(row[key]) / unit


def extent(key: str, digits: int = 2) -> Callable[[Row], str]:
    """Return a column function: median with minimum and maximum in brackets; empty for None.

    Example:
        >>> extent("x")({"x": {"median": 2.0, "lowest": 1.5, "highest": 4.0}})
        '2.00 (1.50-4.00)'
    """

    def said(row: Row) -> str:
        if row[key] is None:
            return ""
        middle, lowest, highest = (f"{each:.{digits}f}" for each in row[key].values())
        return f"{middle} ({lowest}-{highest})"

    return said
