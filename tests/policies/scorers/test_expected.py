"""Attention to expect of queries to come: by chance itself, and against slow loops."""

import attrs
import pytest
import torch

from kvpolicy import LayerContext
from kvpolicy.policies import ExpectedAttention, ExpectedAttentionScorer
from kvpolicy.rotary import PlainRotary
from tests.policies.views import group_of, view_of
from tests.reference.query_agnostic import expected_scores

from .support import THETA, check_tokens, in_a_later_turn, turning


def slow(
    context: LayerContext, row: int, head: int, scorer: ExpectedAttentionScorer
) -> list[float]:
    view = view_of(context, row)
    return expected_scores(
        group_of(view, head),
        view.new_positions,
        view.entries[head],
        next_position=view.seen,
        scaling=view.scaling,
        theta=THETA,
        num_sinks=scorer.num_sinks,
        future_len=scorer.future_len,
        epsilon=scorer.epsilon,
    )


@pytest.mark.parametrize(
    ("context", "sinks", "future", "epsilon"),
    [
        (turning(1, (19, 11, 3), 19), 0, 1, 0.0),
        (turning(70, (19, 11, 3), 19), 4, 70, 0.0),
        (turning(9, (19, 11, 3), 19), 2, 9, 0.3),
        # In a later turn positions go on from the row's own.
        (in_a_later_turn(turning(1, (9, 9), 3)), 4, 20, 0.0),
    ],
)
def test_against_slow_loops(context: LayerContext, sinks: int, future: int, epsilon: float) -> None:
    scorer = ExpectedAttentionScorer(num_sinks=sinks, future_len=future, epsilon=epsilon)
    check_tokens(
        scorer.score(context),
        context,
        lambda row, head: slow(context, row, head, scorer),
        rel=1e-3,
        abs=1e-5,
    )


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
