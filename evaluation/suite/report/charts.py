"""Scatter plots, bars and heat maps."""

from __future__ import annotations

import xml.etree.ElementTree as Tree
from collections.abc import Callable, Mapping, Sequence

import attrs

from kvpolicy.evaluation.suite.report.axes import WIDTH, Axis, Frame, chart, mark, text
from kvpolicy.evaluation.suite.report.markup import node

SCORES = Axis("score, %", 0.0, 100.0, (0.0, 20.0, 40.0, 60.0, 80.0, 100.0))
_ROW, _LABEL, _NUMBERS = 26, 128, 62


@attrs.frozen
class Point:
    """A method in a scatter plot.

    Args:
        series: The number of its policy, which gives its mark.
        x: What it costs.
        score: In percent.
        title: What is said of it under the pointer.
    """

    series: int
    x: float
    score: float
    title: str


def scatter(
    points: Sequence[Point], x: Axis, label: str, *, tick: Callable[[float], str] = "{:g}".format
) -> Tree.Element:
    """Scores against costs; the points of a policy, at several rates, are joined.

    Args:
        points: At least one.
        x: The axis of costs.
        label: What it shows, for who cannot see it.
        tick: How costs are written.
    """
    frame = Frame(x, SCORES)
    drawn = frame.draw(tick)
    by_series: dict[int, list[Point]] = {}
    for point in sorted(points, key=lambda point: point.x):
        by_series.setdefault(point.series, []).append(point)
    for series, own in by_series.items():
        places = [frame.place(point.x, point.score) for point in own]
        line = " ".join(f"{across:.1f},{down:.1f}" for across, down in places)
        drawn.append(node("polyline", class_=f"line c{series % 8}", points=line))
        drawn += [
            mark(series, across, down, point.title)
            for (across, down), point in zip(places, own, strict=True)
        ]
    return chart(frame.top + frame.height + 42, label, drawn)


@attrs.frozen
class Bar:
    """A row of bars.

    Args:
        name: At its left.
        parts: Lengths that follow each other.
        numbers: At its right.
    """

    name: str
    parts: tuple[float, ...]
    numbers: str


def bars(rows: Sequence[Bar], label: str) -> Tree.Element:
    """Rows of bars, each of parts that follow each other.

    Args:
        rows: At least one.
        label: What they show, for who cannot see it.
    """
    longest = max(sum(row.parts) for row in rows) or 1.0
    drawn = []
    for index, row in enumerate(rows):
        top = index * _ROW
        drawn.append(text(row.name, _LABEL - 8, top + 17, anchor="end"))
        start = float(_LABEL)
        for number, part in enumerate(row.parts):
            length = part / longest * (WIDTH - _LABEL - _NUMBERS)
            drawn.append(
                node("rect", class_=f"part p{number}", x=start, y=top + 5, width=length, height=16)
            )
            start += length
        drawn.append(text(row.numbers, start + 6, top + 17))
    return chart(len(rows) * _ROW + 4, label, drawn)


def heat_map(
    columns: Sequence[str],
    rows: Sequence[str],
    values: Mapping[tuple[int, int], tuple[float, int]],
    label: str,
    titles: tuple[str, str],
) -> Tree.Element:
    """Scores by two sides, each on a colour as strong as the score is high.

    Args:
        columns: Names of columns, at least one.
        rows: Names of rows, from the top.
        values: By column and row, the score in percent and of how many samples it is; a place that
            has none stays hatched.
        label: What it shows, for who cannot see it.
        titles: Of the columns and of the rows.
    """
    left, top = 62, 36
    width = min((WIDTH - left) / len(columns), 72)
    drawn = [
        text(titles[0], left, 12),
        text(titles[1], left - 8, top - 7, anchor="end"),
    ]
    for row, name in enumerate(rows):
        drawn.append(text(name, left - 8, top + row * _ROW + 17, anchor="end"))
    for column, name in enumerate(columns):
        x = left + column * width
        drawn.append(text(name, x + width / 2, top - 7, anchor="middle"))
        for row in range(len(rows)):
            drawn += _heat_cell(x, top + row * _ROW, width, values.get((column, row)))
    return chart(top + len(rows) * _ROW + 4, label, drawn)


def _heat_cell(
    x: float, y: float, width: float, value: tuple[float, int] | None
) -> list[Tree.Element]:
    box = {"x": x + 1, "y": y + 1, "width": width - 2, "height": _ROW - 2}
    if value is None:
        return [node("rect", node("title", "no finished samples"), class_="none", **box)]
    score, count = value
    said = node("title", f"{score:.1f} % of {count} samples")
    named = "strong" if score > 55 else None
    return [
        node("rect", class_="ground", **box),
        node("rect", said, class_="heat", fill_opacity=max(score / 100, 0.02), **box),
        text(f"{score:.0f}", x + width / 2, y + 17, anchor="middle", class_=named),
    ]
