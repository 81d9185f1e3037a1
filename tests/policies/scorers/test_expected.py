"""Attention to expect of queries to come: by chance itself, and against slow loops."""

import math

import attrs
import pytest
import torch

from kvpolicy import LayerContext
from kvpolicy.policies import ExpectedAttention, ExpectedAttentionScorer
from kvpolicy.policies.scorers.expected import mean_rotation
from kvpolicy.rotary import PlainRotary
from tests.policies.views import view_of
from tests.reference.query_agnostic import expected_scores

from .support import THETA, in_a_later_turn, turning


def slow(
    context: LayerContext, row: int, head: int, scorer: ExpectedAttentionScorer
) -> list[float]:
    view = view_of(context, row)
    group = len(view.queries) // len(view.entries)
    return expected_scores(
        [list(each) for each in view.queries[head * group : (head + 1) * group]],
        view.new_positions,
        view.entries[head],
        next_position=view.seen,
        scaling=view.scaling,
        theta=THETA,
        num_sinks=scorer.num_sinks,
        future_len=scorer.future_len,
        epsilon=scorer.epsilon,
    )


@pytest.mark.parametrize(("sinks", "future", "epsilon"), [(0, 1, 0.0), (4, 70, 0.0), (2, 9, 0.3)])
def test_against_slow_loops_in_padded_rows(sinks: int, future: int, epsilon: float) -> None:
    lens = (19, 11, 3)
    context = turning(future, lens, 19)
    scorer = ExpectedAttentionScorer(num_sinks=sinks, future_len=future, epsilon=epsilon)
    found = scorer.score(context)
    for row, length in enumerate(lens):
        for head in range(3):
            expected = slow(context, row, head, scorer)
            here = found[row, head, 19 - length :].tolist()
            assert here == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_in_a_later_turn_positions_go_on_from_the_rows_own() -> None:
    context = in_a_later_turn(turning(1, (9, 9), 3))
    scorer = ExpectedAttentionScorer(future_len=20)
    found = scorer.score(context)
    for row in range(2):
        for head in range(3):
            held = context.positions[row, head] >= 0
            expected = slow(context, row, head, scorer)
            assert found[row, head][held].tolist() == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_the_formula_is_the_mean_over_normal_queries() -> None:
    """Exponentials of logits, of 200,000 queries drawn from the mean and covariance."""
    context = turning(2, (40,), 40)
    scorer = ExpectedAttentionScorer(num_sinks=0, future_len=1, by_value=False)
    found = scorer.score(attrs.evolve(context, queries=context.queries / 3)).double()
    rotary = PlainRotary(6, THETA)
    queries = rotary.turned_back(context.queries / 3, torch.arange(40)[None, None]).double()
    generator = torch.Generator().manual_seed(0)
    for head in range(3):
        total = torch.zeros(40, dtype=torch.float64)
        for of_head in queries[0, 2 * head : 2 * head + 2]:
            spread = torch.cov(of_head.T, correction=0)
            factor = torch.linalg.cholesky(spread + 1e-12 * torch.eye(6))
            normal = torch.randn(200_000, 6, generator=generator, dtype=torch.float64)
            drawn = of_head.mean(dim=0) + normal @ factor.T
            ahead = rotary.turned(drawn[None, None], torch.full((1, 1, 1), 40))[0, 0]
            logits = ahead @ context.keys[0, head].double().T * context.attention.scaling
            total += logits.exp().mean(dim=0) / logits.exp().mean(dim=0).sum() / 2
        torch.testing.assert_close(found[0, head], total, rtol=0.2, atol=5e-3)


def test_the_mean_rotation_on_paper() -> None:
    """One pair of channels: to 1 and 2, means of cosines and sines."""
    turn = mean_rotation(PlainRotary(2), torch.tensor([1]), 2, 2)[0]
    cos, sin = (math.cos(1) + math.cos(2)) / 2, (math.sin(1) + math.sin(2)) / 2
    torch.testing.assert_close(turn, torch.tensor([[cos, sin], [-sin, cos]]))


def test_sinks_are_protected_by_the_method() -> None:
    method = ExpectedAttention(retention_tokens=9, window_size=2, num_sinks=5)
    kept = method.decide(turning(4, (30,), 30)).kept
    assert kept.shape == (1, 3, 9)
    assert kept[0, :, :5].tolist() == [[0, 1, 2, 3, 4]] * 3
    assert kept[0, :, 7:].tolist() == [[28, 29]] * 3
    assert len({tuple(head) for head in kept[0].tolist()}) > 1


def test_a_prompt_of_sinks_alone() -> None:
    saliency = ExpectedAttentionScorer().score(turning(5, (3, 2), 3))
    assert saliency.tolist() == [[[0.0] * 3] * 3] * 2
