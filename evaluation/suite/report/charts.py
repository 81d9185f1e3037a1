"""Compute the data of the page's charts, from finished cells only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import attrs

from kvpolicy.evaluation.suite.report import words
from kvpolicy.evaluation.suite.report.axes import Axis
from kvpolicy.evaluation.suite.sample import FULL_CONTEXT
from kvpolicy.evaluation.suite.summary import Cost, Figure, Summary, mean_cost, mean_score

DEPTHS = 5


@attrs.frozen
class Method:
    """A policy's mean score and cost at one prompt length and question, to draw in a chart.

    Args:
        name: With its rate.
        series: The number of its policy, which gives its mark.
        score: The mean over tasks, in percent.
        cost: The mean over tasks.
    """

    name: str
    series: int
    score: float
    cost: Cost


@attrs.frozen
class Place:
    """One panel of the charts: the methods' results at one prompt length and kind of question.

    Args:
        title: Its name.
        methods: Those that are finished.
        missing: Names of those that are not.
        partial: Names of those that were not asked all tasks.
    """

    title: str
    methods: Sequence[Method]
    missing: Sequence[str]
    partial: Sequence[str] = ()

    @property
    def full(self) -> Cost | None:
        """The cost of full context in this panel; None if its answers are not finished."""
        costs = (each.cost for each in self.methods if each.name == FULL_CONTEXT)
        return next(costs, None)


@attrs.frozen
class Point:
    """A method's dot in a scatter plot: its cost, score and tooltip text."""

    series: int
    cost: float
    score: float
    title: str


@attrs.frozen
class Scatter:
    """A scatter plot of methods' scores, in percent, against their costs."""

    costs: Axis
    points: Sequence[Point]

    @classmethod
    def of_memory(cls, place: Place, full: Cost) -> Scatter:
        """Make the scatter plot of scores against cache memory, relative to full context."""
        held = [each.cost.bytes_held for each in place.methods]
        shares = [100 * each / full.bytes_held for each in held]
        points = [
            _point(each, share, words.memory(size))
            for each, share, size in zip(place.methods, shares, held, strict=True)
        ]
        return cls(Axis.in_factors("KV memory, % of full context's", shares, 100.0), points)

    @classmethod
    def of_prefill(cls, place: Place) -> Scatter:
        """Make the scatter plot of scores against seconds of prefill."""
        times = [each.cost.prefill_seconds for each in place.methods]
        unit, factor = ("s", 1.0) if max(times) >= 1 else ("ms", 1000.0)
        points = [
            _point(each, factor * time, words.duration(time))
            for each, time in zip(place.methods, times, strict=True)
        ]
        return cls(Axis.from_zero(f"prefill, {unit} a prompt", factor * max(times)), points)


@attrs.frozen
class NeedleMap:
    """A grid of one method's scores by prompt length and by depth of the needle.

    Args:
        method: Its name.
        lengths: In tokens, with a star where samples are missing.
        depths: Of the rows, from the top, in percent.
        values: By column and row, the score in percent and of how many samples it is.
        finished: Whether all samples are there.
    """

    method: str
    lengths: Sequence[str]
    depths: Sequence[str]
    values: Mapping[tuple[int, int], tuple[float, int]]
    finished: bool

    @classmethod
    def of(cls, summary: Summary, method: str, figures: Sequence[Figure]) -> NeedleMap:
        """Make a method's grid of scores from its results, one per prompt length."""
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
        lengths = [f"{each.cell.length:,}" + ("" if each.finished else "*") for each in figures]
        step = 100 // DEPTHS
        depths = [f"{step * row}\N{EN DASH}{step * (row + 1)}" for row in range(DEPTHS)]
        return cls(method, lengths, depths, values, all(each.finished for each in figures))


def places(summary: Summary) -> list[Place]:
    """Return the charts' panels: mean scores and costs for every prompt length and question."""
    numbers = series(summary)
    found = []
    for length, question in summary.places:
        methods, missing, partial = [], [], []
        for name, figures in summary.under(length, question).items():
            score, cost = mean_score(figures), mean_cost(figures)
            if not all(figure.expected for figure in figures):
                partial.append(name)
            elif score is None or cost is None:
                missing.append(name)
            else:
                methods.append(Method(name, numbers[figures[0].method.policy], score, cost))
        found.append(Place(words.place(length, question), methods, missing, partial))
    return found


def needle_maps(summary: Summary) -> dict[str, list[NeedleMap]]:
    """Return all methods' needle grids, for each task and question that hides needles."""
    with_needles = {
        cell.task
        for cell, samples in summary.samples.items()
        if any(sample.depth is not None for sample in samples)
    }
    found: dict[str, dict[str, list[Figure]]] = {}
    for cell, figure in summary.figures.items():
        if cell.task in with_needles and cell.length is not None:
            of_task = found.setdefault(f"{cell.task}, question {cell.question}", {})
            of_task.setdefault(cell.method, []).append(figure)
    return {
        title: [NeedleMap.of(summary, method, figures) for method, figures in methods.items()]
        for title, methods in found.items()
    }


def series(summary: Summary) -> dict[str, int]:
    """Number the policies, so that each has the same marker in every chart."""
    policies = dict.fromkeys(figure.method.policy for figure in summary.figures.values())
    return {policy: number for number, policy in enumerate(policies)}


def _point(method: Method, cost: float, said: str) -> Point:
    title = f"{method.name}: {method.score:.1f} %, {said}"
    return Point(method.series, cost, method.score, title)
