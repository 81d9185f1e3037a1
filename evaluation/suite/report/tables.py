"""The page's tables: all tasks side by side, and each task with its intervals and costs."""

from __future__ import annotations

import xml.etree.ElementTree as Tree
from collections.abc import Sequence

from kvpolicy.evaluation.suite.report.markup import node
from kvpolicy.evaluation.suite.report.words import (
    duration,
    interval,
    memory,
    place,
    signed,
    unfinished,
)
from kvpolicy.evaluation.suite.statistics import Difference
from kvpolicy.evaluation.suite.summary import Figure, Summary, mean_score

_FOREST_WIDTH, _FOREST_HEIGHT = 120, 18


def overview(summary: Summary, length: int | None, question: str) -> Tree.Element:
    """Methods by tasks at one length and question: scores, and whether they are clearly others."""
    methods = summary.under(length, question)
    tasks = [figure.cell.task for figure in next(iter(methods.values()))]
    names = ["method", *tasks] if len(tasks) == 1 else ["method", "mean", *tasks]
    head = node("tr", *(_header(name) for name in names))
    rows = []
    for method, figures in methods.items():
        mean = mean_score(figures)
        cells = [_overview_cell(figure) for figure in figures]
        if len(tasks) > 1:
            text = "\N{EN DASH}" if mean is None else f"{mean:.1f}"
            cells.insert(0, node("td", text, class_="mean"))
        rows.append(node("tr", node("th", method, scope="row"), *cells))
    return _table(place(length, question), [head], rows)


def task_table(summary: Summary, task: str) -> Tree.Element:
    """A task's cells: score, difference to full context, and costs."""
    figures = [figure for figure in summary.figures.values() if figure.cell.task == task]
    metrics = next((list(figure.scores) for figure in figures if figure.scores), ["score"])
    names = (
        "method",
        f"{metrics[0]} %",
        "to full context, points",
        "95% interval",
        "tokens kept",
        "KV memory",
        "prefill",
        "in all",
        "samples",
        *(f"{metric} %" for metric in metrics[1:]),
    )
    head = node("tr", *(_header(name) for name in names))
    rows: list[Tree.Element] = []
    for length, question in summary.places:
        here = [
            figure
            for figure in figures
            if (figure.cell.length, figure.cell.question) == (length, question)
        ]
        if here:
            title = node("th", place(length, question), colspan=len(names), scope="rowgroup")
            rows.append(node("tr", title, class_="group"))
            rows += [_task_row(figure, metrics) for figure in here]
    return _table(None, [head], rows)


def _task_row(figure: Figure, metrics: Sequence[str]) -> Tree.Element:
    name = node("th", figure.cell.method, scope="row")
    if figure.cost is None:
        said = f"{unfinished(figure)} samples: no numbers yet" if figure.done else "not begun"
        return node("tr", name, node("td", said, class_="open", colspan=7 + len(metrics)))
    cell, cost = figure.cell, figure.cost
    score = node(
        "td",
        f"{figure.scores[metrics[0]]:.1f}",
        class_="score",
        data_task=cell.task,
        data_length=cell.length,
        data_question=cell.question,
        data_method=cell.method,
    )
    return node(
        "tr",
        name,
        score,
        *_difference_cells(figure),
        node("td", f"{cost.tokens_kept:,.0f} of {cost.tokens_seen:,.0f}"),
        node("td", memory(cost.bytes_held)),
        node("td", duration(cost.prefill_seconds)),
        node("td", duration(cost.total_seconds)),
        node("td", str(figure.done)),
        *(node("td", f"{figure.scores[metric]:.1f}") for metric in metrics[1:]),
    )


def _header(name: str) -> Tree.Element:
    """A column's name, which may break behind each of its words."""
    words = [piece for word in name.split("_") for piece in ("_", node("wbr"), word)]
    return node("th", *words[2:], scope="col")


def _overview_cell(figure: Figure) -> Tree.Element:
    if figure.score is None:
        return node("td", unfinished(figure), class_="open")
    difference = figure.difference
    named, arrow, said = None, "", None
    if difference is not None:
        said = f"{signed(difference.mean)} {interval(difference)}"
    if difference is not None and difference.clear:
        named, arrow = ("worse", "▼") if difference.mean < 0 else ("better", "▲")
    sign = node("span", arrow, class_="sign")
    return node("td", f"{figure.score:.1f}", sign, class_=named, title=said)


def _difference_cells(figure: Figure) -> list[Tree.Element]:
    difference = figure.difference
    if difference is None:
        what = "full context" if figure.cell == figure.cell.baseline else "full context unfinished"
        return [node("td", what, class_="none", colspan=2)]
    named = ("worse" if difference.mean < 0 else "better") if difference.clear else None
    text = f"{signed(difference.mean)} {interval(difference)}"
    return [node("td", text, class_=named), node("td", _forest(difference, text))]


def _forest(difference: Difference, label: str) -> Tree.Element:
    """An interval as a line with its mean, from -100 to 100 points."""

    def x(points: float) -> float:
        return _FOREST_WIDTH * (points + 100) / 200

    middle = _FOREST_HEIGHT / 2
    low, high, zero = x(difference.low), x(difference.high), x(0)
    return node(
        "svg",
        node("line", class_="grid", x1=zero, x2=zero, y1=0, y2=_FOREST_HEIGHT),
        node("line", class_="span", x1=low, x2=high, y1=middle, y2=middle),
        node("circle", class_="middle", cx=x(difference.mean), cy=middle, r=3.5),
        viewBox=f"0 0 {_FOREST_WIDTH} {_FOREST_HEIGHT}",
        width=_FOREST_WIDTH,
        height=_FOREST_HEIGHT,
        role="img",
        aria_label=label,
    )


def _table(
    caption: str | None, head: Sequence[Tree.Element], rows: Sequence[Tree.Element]
) -> Tree.Element:
    """A table that scrolls by itself where the page is too narrow for it."""
    above = [] if caption is None else [node("caption", caption)]
    table = node("table", *above, node("thead", *head), node("tbody", *rows))
    return node("div", table, class_="scroll", tabindex=0)
