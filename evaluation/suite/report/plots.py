"""The page's charts, of a folder's figures; what is not finished is left out, and said so."""

from __future__ import annotations

import xml.etree.ElementTree as Tree
from collections.abc import Callable, Sequence
from statistics import fmean

import attrs

from kvpolicy.evaluation.suite.report.axes import Axis, chart, mark
from kvpolicy.evaluation.suite.report.charts import Bar, Point, bars, heat_map, scatter
from kvpolicy.evaluation.suite.report.markup import node
from kvpolicy.evaluation.suite.report.words import duration, memory, place
from kvpolicy.evaluation.suite.sample import FULL_CONTEXT
from kvpolicy.evaluation.suite.summary import Cost, Figure, Summary, mean_cost, mean_score

DEPTHS = 5


@attrs.frozen
class _Placed:
    """A method whose tasks are all finished, at one length and question."""

    method: str
    policy: str
    score: float
    cost: Cost


def memory_charts(summary: Summary) -> list[Tree.Element]:
    """Score against the bytes held, as a share of full context's."""

    def draw(found: Sequence[_Placed], full: Cost, title: str) -> Tree.Element:
        shares = [100 * each.cost.bytes_held / full.bytes_held for each in found]
        axis = Axis.in_factors("KV memory, % of full context's", shares, 100.0)
        said = [memory(each.cost.bytes_held) for each in found]
        return scatter(_points(summary, found, shares, said), axis, title)

    return _charts(summary, "score against KV memory", draw)


def prefill_charts(summary: Summary) -> list[Tree.Element]:
    """Score against the seconds of the prefill."""

    def draw(found: Sequence[_Placed], full: Cost, title: str) -> Tree.Element:
        seconds = [each.cost.prefill_seconds for each in found]
        unit, factor = ("s", 1.0) if max(seconds) >= 1 else ("ms", 1000.0)
        times = [factor * each for each in seconds]
        axis = Axis.from_zero(f"prefill, {unit} a prompt", max(times))
        said = [duration(each) for each in seconds]
        return scatter(_points(summary, found, times, said), axis, title)

    return _charts(summary, "score against prefill time", draw)


def latency_charts(summary: Summary) -> list[Tree.Element]:
    """Seconds of the prefill and of what follows, a row a method."""

    def draw(found: Sequence[_Placed], full: Cost, title: str) -> Tree.Element:
        rows = [_bar(each) for each in found]
        return bars(rows, title)

    return _charts(summary, "time of a sample", draw)


def needle_maps(summary: Summary) -> dict[str, list[Tree.Element]]:
    """Score by length and depth of the needle: maps of all methods for each task and question."""
    with_needles = {
        cell.task
        for cell, samples in summary.samples.items()
        if any(sample.depth is not None for sample in samples)
    }
    by_method: dict[tuple[str, str], list[Figure]] = {}
    for figure in summary.figures.values():
        cell = figure.cell
        if cell.task in with_needles and cell.length is not None:
            title = f"{cell.task}, question {cell.question}"
            by_method.setdefault((title, cell.method), []).append(figure)
    maps: dict[str, list[Tree.Element]] = {}
    for (title, method), figures in by_method.items():
        maps.setdefault(title, []).append(_needle_map(summary, title, method, figures))
    return maps


def legend(summary: Summary) -> Tree.Element:
    """Which mark stands for which policy."""
    entries = [
        node("li", _swatch(number), f" {policy}") for policy, number in _series(summary).items()
    ]
    return node("ul", *entries, class_="legend")


def _charts(
    summary: Summary,
    what: str,
    draw: Callable[[Sequence[_Placed], Cost, str], Tree.Element],
) -> list[Tree.Element]:
    """A chart for each length and question, with what had to be left out below it."""
    drawn = []
    for length, question in summary.places:
        methods = summary.under(length, question)
        found = [_placed(method, figures) for method, figures in methods.items()]
        finished = [each for each in found if each is not None]
        full = next((each.cost for each in finished if each.method == FULL_CONTEXT), None)
        title = place(length, question)
        missing = [name for name, each in zip(methods, found, strict=True) if each is None]
        parts = [node("figcaption", title)]
        if full is not None:
            parts.append(draw(finished, full, f"{what}, {title}"))
        if missing:
            parts.append(node("p", f"unfinished: {', '.join(missing)}", class_="open"))
        drawn.append(node("figure", *parts))
    return drawn


def _placed(method: str, figures: Sequence[Figure]) -> _Placed | None:
    score, cost = mean_score(figures), mean_cost(figures)
    if score is None or cost is None:
        return None
    return _Placed(method, figures[0].method.policy, score, cost)


def _points(
    summary: Summary, found: Sequence[_Placed], costs: Sequence[float], said: Sequence[str]
) -> list[Point]:
    series = _series(summary)
    return [
        Point(series[each.policy], cost, each.score, f"{each.method}: {each.score:.1f} %, {text}")
        for each, cost, text in zip(found, costs, said, strict=True)
    ]


def _series(summary: Summary) -> dict[str, int]:
    """A number for each policy, by which it has the same mark everywhere."""
    policies = dict.fromkeys(figure.method.policy for figure in summary.figures.values())
    return {policy: number for number, policy in enumerate(policies)}


def _swatch(number: int) -> Tree.Element:
    swatch = chart(14, "", [mark(number, 7, 7)])
    swatch.attrib.update(viewBox="0 0 14 14", width="14", role="presentation")
    return swatch


def _bar(placed: _Placed) -> Bar:
    prefill, total = placed.cost.prefill_seconds, placed.cost.total_seconds
    return Bar(placed.method, (prefill, max(total - prefill, 0.0)), duration(total))


def _needle_map(
    summary: Summary, title: str, method: str, figures: Sequence[Figure]
) -> Tree.Element:
    values: dict[tuple[int, int], tuple[float, int]] = {}
    for column, figure in enumerate(figures):
        if not figure.finished:
            continue
        by_depth: dict[int, list[float]] = {}
        scores = summary.percents(figure.cell)
        for sample, score in zip(summary.samples[figure.cell], scores, strict=True):
            if sample.depth is not None:
                row = min(int(sample.depth * DEPTHS), DEPTHS - 1)
                by_depth.setdefault(row, []).append(score)
        values |= {(column, row): (fmean(each), len(each)) for row, each in by_depth.items()}
    columns = [f"{figure.cell.length:,}" + ("" if figure.finished else "*") for figure in figures]
    step = 100 // DEPTHS
    rows = [f"{step * row}\N{EN DASH}{step * (row + 1)}" for row in range(DEPTHS)]
    parts = [
        node("figcaption", method),
        heat_map(columns, rows, values, f"needles of {title}, {method}", ("tokens", "depth %")),
    ]
    if not all(figure.finished for figure in figures):
        parts.append(node("p", "* unfinished", class_="open"))
    return node("figure", *parts)
