"""Keys against three means: on paper, against slow loops, and the method NestedKV."""

import math

import attrs
import pytest
import torch

from kvpolicy import LayerContext
from kvpolicy.policies import KeyAnomalyScorer, NestedKV
from tests.reference.anomaly import anomaly_scores

from .support import check_tokens, held_by, in_a_later_turn, layer_of, random_layer, turning


def test_three_tokens_on_paper() -> None:
    """Directions (1, 0), (1, 0) and (0, 1); one block of two, one of one; windows of two.

    Minus the cosines with the mean of all, along (2, 1): -2, -2 and -1 over the root of 5; with the
    blocks': -1 each, so all 0; with the last two: -1, -1 and, along (1, 1), minus the root of 1/2.
    So the third token is the most unlike for the first and the third mean, and the blocks' says
    nothing of the head.
    """
    keys = torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.0, 3.0]])
    saliency = KeyAnomalyScorer(local_size=2, block_size=2).score(layer_of(keys))[0, 0]
    gain = math.exp(3.0)  # the highest tenth is one token of 1, the lowest one of 0
    mixed = (0.4 * gain + 0.2 * gain) / (0.4 * gain + 0.4 + 0.2 * gain)
    gate = 1 / (1 + math.exp(-10 * (1 - 1 / 3 - 0.6)))  # only the third token has a deviation
    expected = torch.tensor([0.0, 0.0, mixed + gate * (1 - mixed)])
    torch.testing.assert_close(saliency, expected)


def test_equal_keys_have_no_anomaly() -> None:
    assert KeyAnomalyScorer().score(layer_of(torch.ones(5, 3))).tolist() == [[[0.0] * 5]]


@pytest.mark.parametrize(
    "context",
    [random_layer(3, (41, 23, 2, 1)), in_a_later_turn(turning(5, (9, 9), 0))],
    ids=["padded rows", "a later turn"],
)
@pytest.mark.parametrize(("local", "block"), [(1, 1), (3, 4), (4, 7), (64, None), (3, 100)])
def test_against_slow_loops(context: LayerContext, local: int, block: int | None) -> None:
    """Blocks and means are of what each head holds."""

    def expected(row: int, head: int) -> list[float]:
        return anomaly_scores(list(held_by(context, row, head)[0]), local, block)

    found = KeyAnomalyScorer(local_size=local, block_size=block).score(context)
    check_tokens(found, context, expected, abs=1e-5)


@pytest.mark.parametrize(("length", "size"), [(100, 128), (5000, 156), (9000, 256)])
def test_the_size_of_blocks_follows_the_length(length: int, size: int) -> None:
    context = random_layer(1, (length,), head_dim=2)
    scorer = KeyAnomalyScorer()
    same = attrs.evolve(scorer, block_size=size)
    other = attrs.evolve(scorer, block_size=size - 1)
    assert torch.equal(scorer.score(context), same.score(context))
    assert length <= 128 or not torch.equal(scorer.score(context), other.score(context))


def test_the_heads_share_the_budget_and_keep_the_first_tokens() -> None:
    context = random_layer(2, (60,))
    kept = NestedKV(0.3, block_size=10, local_size=4).decide(context).kept
    counts = (kept >= 0).sum(dim=-1)
    assert int(counts.sum()) == 3 * 18
    assert len(set(counts[0].tolist())) > 1
    for head in kept[0]:
        assert head[head >= 0][:4].tolist() == [0, 1, 2, 3]
