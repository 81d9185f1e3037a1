"""Figures by hand: right numbers where a cell is finished, and none where it is not."""

from pathlib import Path

import attrs
import pytest

from kvpolicy.evaluation.suite import Cell, Summary, load, paired_difference
from kvpolicy.evaluation.suite.folder import Results
from kvpolicy.evaluation.suite.summary import mean_cost, mean_score
from tests.evaluation.suite.stand_in import StandIn, filled

SNAP = Cell("needle", 256, "with", "snapkv 0.1")


def test_a_finished_cell_by_hand(tmp_path: Path) -> None:
    figure = Summary.of(filled(tmp_path)).figures[SNAP]
    assert figure.finished
    assert figure.scores == pytest.approx({"match": 100 * 4 / 6, "other": 25.0})
    wanted = paired_difference([1, 1, 0, 1, 1, 0], [1] * 6)
    assert figure.difference is not None
    assert attrs.astuple(figure.difference) == pytest.approx(
        tuple(100 * each for each in attrs.astuple(wanted))
    )
    assert figure.cost is not None
    assert figure.cost.tokens_seen == 256
    assert figure.cost.tokens_kept == pytest.approx(25.6)
    assert figure.cost.bytes_held == round(25.6 * 512)
    assert figure.cost.prefill_seconds == pytest.approx(0.256 + 0.00025)  # the median of six
    full = Summary.of(load(tmp_path)).figures[SNAP.baseline]
    assert full.score == 100.0
    assert full.difference is None


def test_differences_are_paired_by_document_whatever_the_order(tmp_path: Path) -> None:
    results = filled(tmp_path)
    turned = Results(results.description, results.samples[::-1])
    assert Summary.of(turned).figures == Summary.of(results).figures


@pytest.mark.parametrize("stop", [2, 6, 8, 10])
def test_nothing_is_said_of_what_is_not_finished(tmp_path: Path, stop: int) -> None:
    """Six of full context, then six of SnapKV."""
    with pytest.raises(KeyboardInterrupt):
        filled(tmp_path, StandIn(stop_after=stop))
    summary = Summary.of(load(tmp_path))
    full, snap = summary.figures[SNAP.baseline], summary.figures[SNAP]
    assert (full.done, snap.done) == (min(stop, 6), max(stop - 6, 0))
    assert (full.score is None) == (stop < 6)
    for figure in (snap, *(each for each in summary.figures.values() if not each.finished)):
        assert figure.score is figure.difference is figure.cost is None
        assert figure.scores == figure.differences == {}
    assert mean_score([full, snap]) is None
    assert mean_cost([full, snap]) is None


def test_no_difference_to_what_is_not_finished(tmp_path: Path) -> None:
    results = filled(tmp_path)
    gone = next(each for each in results.samples if each.cell == SNAP.baseline)
    left = Results(results.description, tuple(each for each in results.samples if each != gone))
    figure = Summary.of(left).figures[SNAP]
    assert figure.finished
    assert figure.score == pytest.approx(100 * 4 / 6)
    assert figure.difference is None


def test_scores_of_a_hundred_are_percent_already(tmp_path: Path) -> None:
    results = filled(tmp_path)

    def hundredfold(metric: str) -> Results:
        samples = []
        for sample in results.samples:
            scores = dict(sample.answer.scores)
            scores[metric] *= 100
            samples.append(attrs.evolve(sample, answer=attrs.evolve(sample.answer, scores=scores)))
        return Results(results.description, tuple(samples))

    assert Summary.of(hundredfold("match")).figures == Summary.of(results).figures


def test_means_over_tasks_by_hand(tmp_path: Path) -> None:
    summary = Summary.of(filled(tmp_path))
    figures = [summary.figures[attrs.evolve(SNAP, length=length)] for length in (256, 512)]
    assert mean_score(figures) == pytest.approx(100 * 4 / 6)
    cost = mean_cost(figures)
    assert cost is not None
    assert cost.tokens_seen == 384
    assert mean_score([]) is None
    assert summary.places == [
        (256, "with"),
        (256, "later"),
        (512, "with"),
        (512, "later"),
        (None, "with"),
        (None, "later"),
    ]
