"""Summarise a folder of samples: the scores and costs of every cell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median

import attrs

from kvpolicy.evaluation.intervals import Difference, paired_difference
from kvpolicy.evaluation.suite.folder import Results
from kvpolicy.evaluation.suite.sample import FULL_CONTEXT, Cell, Method, Sample


@attrs.frozen
class Cost:
    """A cell's costs per sample: mean tokens and cache bytes, median seconds.

    Args:
        tokens_seen: Tokens of a prompt.
        tokens_kept: Of them after prefill, over layers and heads.
        bytes_held: Of the cache after prefill.
        prefill_seconds: Reading a prompt.
        total_seconds: And answering it.
    """

    tokens_seen: float
    tokens_kept: float
    bytes_held: float
    prefill_seconds: float
    total_seconds: float

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Cost:
        """Compute the mean and median costs of one or more samples."""

        def over(middle: Callable[[list[float]], float], name: str) -> float:
            return middle([float(getattr(each.answer, name)) for each in samples])

        return cls(
            *(over(fmean, name) for name in ("tokens_seen", "tokens_kept", "bytes_held")),
            *(over(median, name) for name in ("prefill_seconds", "total_seconds")),
        )


@attrs.frozen
class Figure:
    """A cell's mean scores and costs, known once all its samples are finished.

    Args:
        cell: The cell.
        method: What was asked under.
        done: Finished samples.
        expected: Samples that the cell has when it is finished; 0 if it was not asked for.
        scores: Mean score by metric, in percent, first the one that counts; empty unless finished.
        differences: To full context by metric, in percentage points; empty unless both are
            finished, and for full context itself.
        cost: What it cost; None unless finished.
    """

    cell: Cell
    method: Method
    done: int
    expected: int
    scores: dict[str, float]
    differences: dict[str, Difference]
    cost: Cost | None

    @property
    def finished(self) -> bool:
        """True if all of the cell's samples are finished; False if none was asked for."""
        return self.done == self.expected > 0

    @property
    def score(self) -> float | None:
        """The mean of the task's main metric; None unless finished."""
        return next(iter(self.scores.values()), None)

    @property
    def difference(self) -> Difference | None:
        """The difference from full context in the task's main metric."""
        return next(iter(self.differences.values()), None)


@attrs.frozen
class Summary:
    """The mean scores and costs of all cells in a folder of results, in order.

    Args:
        figures: By cell.
        samples: The samples of every cell, by document.
        largest: What each task's metrics give for the best answer.
    """

    figures: Mapping[Cell, Figure]
    samples: Mapping[Cell, Sequence[Sample]]
    largest: Mapping[tuple[str, str], float]

    @classmethod
    def of(cls, results: Results) -> Summary:
        """Compute the mean scores and costs of all cells in a folder of results."""
        samples = results.by_cell()
        largest = largest_scores(results.samples)
        figures = {
            cell: _figure(results, cell, samples, largest) for cell in results.description.expected
        }
        return cls(figures, samples, largest)

    def percents(self, cell: Cell) -> list[float]:
        """Return a cell's sample scores in percent, by the task's main metric."""
        found = []
        for sample in self.samples[cell]:
            metric, score = next(iter(sample.answer.scores.items()))
            found.append(100 * score / self.largest[cell.task, metric])
        return found

    @property
    def tasks(self) -> list[str]:
        """The names of the tasks in the folder."""
        return list(dict.fromkeys(cell.task for cell in self.figures))

    @property
    def methods(self) -> list[str]:
        """The labels of the methods in the folder, full context first."""
        return list(dict.fromkeys(cell.method for cell in self.figures))

    @property
    def places(self) -> list[tuple[int | None, str]]:
        """The pairs of prompt length and kind of question for which there are results."""
        found = dict.fromkeys((cell.length, cell.question) for cell in self.figures)
        return sorted(found, key=lambda pair: (pair[0] is None, pair[0] or 0, pair[1] != "with"))

    def under(self, length: int | None, question: str) -> dict[str, list[Figure]]:
        """Return each method's results at a prompt length and question, one per task.

        A task that was not asked under a method has a figure of no samples there.
        """
        here = [
            figure
            for cell, figure in self.figures.items()
            if (cell.length, cell.question) == (length, question)
        ]
        methods = {figure.cell.method: figure.method for figure in here}
        tasks = dict.fromkeys(figure.cell.task for figure in here)
        found: dict[str, list[Figure]] = {}
        for label in (each for each in self.methods if each in methods):
            cells = [Cell(task, length, question, label) for task in tasks]
            found[label] = [
                self.figures.get(cell) or Figure(cell, methods[label], 0, 0, {}, {}, None)
                for cell in cells
            ]
        return found

    @property
    def uneven(self) -> dict[tuple[str, int | None, str], list[Figure]]:
        """Results of each task, length and question whose methods have unequal sample counts."""
        groups: dict[tuple[str, int | None, str], list[Figure]] = {}
        for cell, figure in self.figures.items():
            groups.setdefault((cell.task, cell.length, cell.question), []).append(figure)
        return {
            place: group
            for place, group in groups.items()
            if len({figure.expected for figure in group}) > 1
        }


def mean_score(figures: Sequence[Figure]) -> float | None:
    """Return the main metric's mean over tasks; None unless all tasks are finished."""
    scores = [figure.score for figure in figures]
    known = [score for score in scores if score is not None]
    return fmean(known) if known and len(known) == len(scores) else None


def mean_cost(figures: Sequence[Figure]) -> Cost | None:
    """Return the mean cost per sample over tasks; None unless all tasks are finished."""
    costs = [figure.cost for figure in figures if figure.cost is not None]
    if not costs or len(costs) < len(figures):
        return None
    names = [each.name for each in attrs.fields(Cost)]
    return Cost(**{name: fmean(getattr(cost, name) for cost in costs) for name in names})


def _figure(
    results: Results,
    cell: Cell,
    samples: Mapping[Cell, Sequence[Sample]],
    largest: Mapping[tuple[str, str], float],
) -> Figure:
    description = results.description
    own = samples[cell]
    full = {sample.document: sample for sample in samples.get(cell.baseline, ())}
    expected = description.expected[cell]
    method = description.methods[cell.method]
    if len(own) < expected:
        return Figure(cell, method, len(own), expected, {}, {}, None)
    scores, differences = {}, {}
    for metric in own[0].answer.scores:
        one = largest[cell.task, metric] / 100
        points = [sample.answer.scores[metric] / one for sample in own]
        scores[metric] = fmean(points)
        if cell.method != FULL_CONTEXT and all(sample.document in full for sample in own):
            baseline = [full[sample.document].answer.scores[metric] / one for sample in own]
            differences[metric] = paired_difference(points, baseline, scale=100.0)
    return Figure(cell, method, len(own), expected, scores, differences, Cost.of(own))


def largest_scores(samples: Sequence[Sample]) -> dict[tuple[str, str], float]:
    """Return each metric's largest possible score: 1, or 100 if any score exceeds 1."""
    largest: dict[tuple[str, str], float] = {}
    for sample in samples:
        for metric, score in sample.answer.scores.items():
            key = sample.cell.task, metric
            largest[key] = 100.0 if score > 1 else largest.get(key, 1.0)
    return largest
