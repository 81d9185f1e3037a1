"""Tokens against those that follow: on paper, against slow loops, and its method."""

import attrs
import pytest
import torch

from kvpolicy.policies import LagKV, LagKVScorer
from tests.reference.runs import lag_scores

from .support import layer_of, random_layer, rows_of


def test_two_runs_on_paper() -> None:
    """A sink, two runs of three of which the second spans [0, 4] and [0, 2], and one token more.

    In that span the first run's tokens lie at (0, 0), (1, 0) and (1/2, 1/4).
    """
    keys = torch.tensor(
        [
            [9.0, 9.0],
            *([0.0, 0.0], [4.0, 0.0], [2.0, 0.5]),
            *([0.0, 2.0], [4.0, 0.0], [1.0, 1.0]),
            [7.0, 7.0],
        ]
    )
    saliency = LagKVScorer(num_sinks=1, lag_size=3).score(layer_of(keys))
    expected = [2.0, 0.0, 2 / 3, 1 / 3, 1.0, 1.25, 1.5, 1.75]
    torch.testing.assert_close(saliency[0, 0], torch.tensor(expected))
    kept = LagKV(retention_tokens=6, window_size=0, num_sinks=1, lag_size=3).decide(layer_of(keys))
    assert kept.kept.tolist() == [[[0, 2, 4, 5, 6, 7]]]


def test_a_context_of_less_than_two_runs_goes_by_recency() -> None:
    keys = torch.tensor([[3.0, 1.0], [2.0, 2.0], [0.0, 5.0], [4.0, 4.0], [1.0, 0.0]])
    saliency = LagKVScorer(num_sinks=1, lag_size=3).score(layer_of(keys))
    assert saliency.tolist() == [[[2.0, 1.0, 1.25, 1.5, 1.75]]]


def test_a_small_budget_keeps_sinks_and_the_most_recent() -> None:
    context = random_layer(0, (23,))
    kept = LagKV(retention_tokens=5, window_size=1, num_sinks=2, lag_size=4).decide(context).kept
    assert kept.tolist() == [[[0, 1, 20, 21, 22]] * 3]


def test_a_constant_channel_counts_as_nothing() -> None:
    """The second channel of the last run is 1 throughout; the first decides, 0, 1/2, 1 apart."""
    keys = torch.tensor([[2.0, 5.0], [4.0, -5.0], [0.0, 9.0], [0.0, 1.0], [4.0, 1.0], [1.0, 1.0]])
    saliency = LagKVScorer(num_sinks=0, lag_size=3).score(layer_of(keys))
    expected = torch.tensor([1 / 3, 2 / 3, 0.0, 1.0, 1 + 1 / 3, 1 + 2 / 3])
    torch.testing.assert_close(saliency[0, 0], expected)


def test_equal_tokens_rank_by_their_order() -> None:
    saliency = LagKVScorer(num_sinks=0, lag_size=2).score(layer_of(torch.ones(4, 3)))
    assert saliency.tolist() == [[[0.5, 0.0, 1.0, 1.5]]]


@pytest.mark.parametrize(("sinks", "lag"), [(0, 1), (0, 4), (2, 3), (4, 5), (3, 11), (50, 2)])
def test_against_slow_loops_in_padded_rows(sinks: int, lag: int) -> None:
    lens = (23, 9, 2, 29)
    context = random_layer(lag, lens)
    found = rows_of(LagKVScorer(num_sinks=sinks, lag_size=lag).score(context), lens)
    for row, length in enumerate(lens):
        for head in range(3):
            keys, values = (
                each[row, head, -length:].tolist() for each in (context.keys, context.values)
            )
            expected = lag_scores(range(length), keys, values, num_sinks=sinks, lag_size=lag)
            assert found[row][head] == pytest.approx(expected, abs=1e-6)


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
