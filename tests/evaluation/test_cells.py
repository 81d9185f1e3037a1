"""Sums of outcomes, by hand, and what is said of two policies."""

import attrs
import pytest

from kvpolicy.evaluation.cells import cells_of, compared
from kvpolicy.evaluation.intervals import paired_difference, share_interval
from kvpolicy.evaluation.scoring import Outcome

ONE = Outcome(
    policy="full",
    kind="word",
    text="a",
    score=1.0,
    log_prob=-2.0,
    answer_len=2,
    divergence=0.0,
    seen=100,
    kept=100.0,
    held_bytes=1000,
    full_bytes=1000,
)


def outcomes(*rows: tuple[float | None, float]) -> list[Outcome]:
    """Full context always right at -1 for each token, and another with score and log_prob."""
    found = []
    for score, log_prob in rows:
        found += [
            attrs.evolve(ONE, score=None if score is None else 1.0),
            attrs.evolve(
                ONE,
                policy="own",
                score=score,
                log_prob=log_prob,
                divergence=0.5,
                kept=20.0,
                held_bytes=250,
            ),
        ]
    return found


def test_cells_by_hand() -> None:
    listed = outcomes((1.0, -2.0), (0.0, -6.0), (0.5, -4.0))
    other = attrs.evolve(ONE, kind="number", score=0.0)
    full, own, number = cells_of([*listed, other])
    assert (full.policy, full.kind, full.count) == ("full", "word", 3)
    assert (full.score, full.log_prob, full.divergence) == (1.0, -1.0, 0.0)
    assert (full.kept, full.held) == (1.0, 1.0)
    assert (own.policy, own.kind, own.count) == ("own", "word", 3)
    assert own.score == 0.5
    assert own.interval == share_interval(0.5, 3)
    assert own.log_prob == pytest.approx(-2.0)  # the mean of -1, -3 and -2
    assert own.kept == pytest.approx(0.2)
    assert (own.divergence, own.held) == (0.5, 0.25)
    assert (number.kind, number.score, number.count) == ("number", 0.0, 1)
    assert cells_of([]) == []


def test_nothing_generated_has_no_score() -> None:
    listed = outcomes((None, -4.0))
    assert [(each.score, each.interval) for each in cells_of(listed)] == [(None, None)] * 2
    found = compared(listed, "own", "full")
    assert found.scores is None
    assert str(found) == (
        "own and full, 1 questions: log-probability -1.000, too few questions to tell"
    )


def test_a_difference_is_paired() -> None:
    listed = outcomes(*[(0.0, -6.0 - each) for each in range(8)])
    found = compared(listed, "own", "full")
    assert found.scores == paired_difference([0.0] * 8, [1.0] * 8)
    assert found.log_prob == -3.75  # the middle of -2, -2.5, ... -5.5
    assert found.log_prob_interval == (-5.5, -2.0)
    assert str(found) == (
        "own and full, 8 questions: right answers -1.00 [-1.00, -0.43]; "
        "log-probability -3.750 [-5.500, -2.000]"
    )
    back = compared(listed, "full", "own")
    assert back.log_prob == 3.75
    assert back.scores is not None
    assert back.scores.mean == 1.0


def test_ties_are_said() -> None:
    listed = outcomes(*[(1.0, -2.0 + 0.25 * (-1) ** each) for each in range(8)])
    assert str(compared(listed, "own", "full")) == (
        "own and full, 8 questions: right answers +0.00 [-0.28, +0.28], no clear difference; "
        "log-probability +0.000 [-0.125, +0.125], no clear difference"
    )


def test_what_was_not_asked_cannot_be_compared() -> None:
    listed = outcomes((1.0, -2.0))
    with pytest.raises(ValueError, match="as many questions of none as of full.*got 0 and 1"):
        compared(listed, "none", "full")
    with pytest.raises(ValueError, match="got 1 and 2"):
        compared([*listed, ONE], "own", "full")
