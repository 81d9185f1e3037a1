"""Tokens against those that follow: on paper, against slow loops, and its method."""

import attrs
import pytest
import torch

from kvpolicy.policies import LagKV, LagKVScorer
from tests.reference.runs import lag_scores

from .support import check_tokens, held_by, layer_of, random_layer


def test_two_runs_on_paper() -> None:
    """A sink, two runs of three of which the second spans [0, 4] and [0, 2], and one token more.

    In that span the first run's tokens lie at (0, 0), (1, 0) and (1/2, 1/4).
    """
    keys = torch.tensor(
        [
            [9.0, 9.0],
            [0.0, 0.0],
            [4.0, 0.0],
            [2.0, 0.5],
            [0.0, 2.0],
            [4.0, 0.0],
            [1.0, 1.0],
            [7.0, 7.0],
        ]
    )
    saliency = LagKVScorer(num_sinks=1, lag_size=3).score(layer_of(keys))
    expected = [2.0, 0.0, 2 / 3, 1 / 3, 1.0, 1.25, 1.5, 1.75]
    torch.testing.assert_close(saliency[0, 0], torch.tensor(expected))
    kept = LagKV(retention_tokens=6, window_size=0, num_sinks=1, lag_size=3).decide(layer_of(keys))
    assert kept.kept.tolist() == [[[0, 2, 4, 5, 6, 7]]]


@pytest.mark.parametrize(
    ("keys", "sinks", "lag", "expected"),
    [
        # Less than two runs go by recency.
        ([[3, 1], [2, 2], [0, 5], [4, 4], [1, 0]], 1, 3, [2.0, 1.0, 1.25, 1.5, 1.75]),
        # A constant channel, the second of the last run, counts as nothing; the first decides.
        (
            [[2, 5], [4, -5], [0, 9], [0, 1], [4, 1], [1, 1]],
            0,
            3,
            [1 / 3, 2 / 3, 0.0, 1.0, 1 + 1 / 3, 1 + 2 / 3],
        ),
        # Equal tokens rank by their order.
        ([[1, 1, 1]] * 4, 0, 2, [0.5, 0.0, 1.0, 1.5]),
    ],
)
def test_runs_on_paper(
    keys: list[list[float]], sinks: int, lag: int, expected: list[float]
) -> None:
    scorer = LagKVScorer(num_sinks=sinks, lag_size=lag)
    saliency = scorer.score(layer_of(torch.tensor(keys, dtype=torch.float32)))
    torch.testing.assert_close(saliency[0, 0], torch.tensor(expected))


def test_a_small_budget_keeps_sinks_and_the_most_recent() -> None:
    context = random_layer(0, (23,))
    kept = LagKV(retention_tokens=5, window_size=1, num_sinks=2, lag_size=4).decide(context).kept
    assert kept.tolist() == [[[0, 1, 20, 21, 22]] * 3]


@pytest.mark.parametrize(("sinks", "lag"), [(0, 1), (0, 4), (2, 3), (4, 5), (3, 11), (50, 2)])
def test_against_slow_loops_in_padded_rows(sinks: int, lag: int) -> None:
    context = random_layer(lag, (23, 9, 2, 29))

    def expected(row: int, head: int) -> list[float]:
        keys, values = (each.tolist() for each in held_by(context, row, head))
        return lag_scores(range(len(keys)), keys, values, num_sinks=sinks, lag_size=lag)

    found = LagKVScorer(num_sinks=sinks, lag_size=lag).score(context)
    check_tokens(found, context, expected, abs=1e-6)


def test_evicted_sinks_are_not_made_up_for() -> None:
    """In a later turn whose first token is gone, the one sink that is left stands before runs."""
    context = attrs.evolve(
        random_layer(3, (9,)),
        positions=torch.tensor([[[1, 7, 8, 9, 12, 13, 14, 15, 16]]]).expand(1, 3, 9),
        seen_len=(17,),
    )
    saliency = LagKVScorer(num_sinks=2, lag_size=4).score(context)
    assert saliency[0, :, 0].tolist() == [2.0] * 3
    assert saliency[0, :, 1:5].sort(dim=-1).values.tolist() == [[0.0, 0.25, 0.5, 0.75]] * 3
    assert saliency[0, :, 5:].tolist() == [[1.0, 1.25, 1.5, 1.75]] * 3
