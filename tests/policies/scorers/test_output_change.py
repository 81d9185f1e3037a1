"""The change of a head's output: on paper, against evictions one by one, and at its limits."""

import attrs
import pytest
import torch
from torch import Tensor

from kvpolicy import LayerContext, Scorer
from kvpolicy.policies import CAOTEScorer, KeyNormScorer, LastQueryScorer, WindowMaxPoolScorer

from .support import check_tokens, held_by, layer_of, random_layer


@attrs.frozen(eq=False)
class Given(Scorer):
    """The saliency that it was given."""

    saliency: Tensor

    def score(self, context: LayerContext) -> Tensor:
        return self.saliency.clone()


def changes(weights: list[float], values: list[list[float]], *, fast: bool = False) -> list[float]:
    context = layer_of(torch.ones(len(weights), 2), torch.tensor(values))
    scorer = CAOTEScorer(Given(torch.tensor([[weights]])), fast=fast)
    found: list[float] = scorer.score(context)[0, 0].tolist()
    return found


VALUES = [[0.0, 0.0], [4.0, 0.0], [0.0, 8.0]]


def test_on_paper() -> None:
    """Weights 1/2, 1/4, 1/4 make (1, 2); without a token (2, 4), (0, 8/3), (4/3, 0)."""
    expected = [5**0.5, (1 + 4 / 9) ** 0.5, (1 / 9 + 4) ** 0.5]
    assert changes([2.0, 1.0, 1.0], VALUES) == pytest.approx(expected)


def test_the_fast_form_on_paper() -> None:
    """The mean is (4/3, 8/3)."""
    distances = [(16 + 64) ** 0.5 / 3, (64 + 64) ** 0.5 / 3, (16 + 256) ** 0.5 / 3]
    expected = [distances[0], distances[1] / 3, distances[2] / 3]
    assert changes([2.0, 1.0, 1.0], VALUES, fast=True) == pytest.approx(expected)


def test_at_the_limits() -> None:
    assert changes([0.0, 3.0, 0.0], VALUES) == pytest.approx([0.0, 4.0, 0.0])
    mean = 128**0.5 / 3
    assert changes([0.0, 3.0, 0.0], VALUES, fast=True) == pytest.approx([0.0, mean * 1e6, 0.0])
    assert changes([0.0, 0.0, 0.0], VALUES) == [0.0, 0.0, 0.0]
    assert changes([-1.0, 2.0, 2.0], VALUES) == pytest.approx([0.0, 20**0.5, 20**0.5])
    assert changes([5.0], [[3.0, 4.0]]) == pytest.approx([5.0])


def test_a_token_with_nearly_all_weight_is_exact() -> None:
    """The others are a hundred-millionth, which 1 - a in float32 does not see."""
    found = changes([1.0, 1e-8, 1e-8], VALUES)
    assert found == pytest.approx([20**0.5, 4e-8, 8e-8], rel=1e-5)


def evicted_one_by_one(weights: Tensor, values: Tensor) -> list[float]:
    """How far the output is from that of the others alone, for each token, in float64."""
    weights, values = weights.double(), values.double()
    output = weights @ values / weights.sum()
    moved = []
    for token in range(len(weights)):
        others = [i for i in range(len(weights)) if i != token]
        without = weights[others] @ values[others] / weights[others].sum()
        moved.append(float((output - without).norm()))
    return moved


@pytest.mark.parametrize(
    "base", [LastQueryScorer(), WindowMaxPoolScorer(3, kernel_size=3)], ids=str
)
def test_against_evictions_one_by_one_in_padded_rows(base: Scorer) -> None:
    context = random_layer(11, (17, 8), query_len=3)
    attention = base.score(context)

    def expected(row: int, head: int) -> list[float]:
        _, values = held_by(context, row, head // 2)
        return evicted_one_by_one(attention[row, head, -len(values) :], values)

    check_tokens(CAOTEScorer(base).score(context), context, expected, rel=1e-4)


def test_the_fast_form_in_padded_rows() -> None:
    context = random_layer(12, (17, 8), query_len=1)

    def expected(row: int, head: int) -> list[float]:
        keys, values = (each.double() for each in held_by(context, row, head))
        share = keys.norm(dim=-1) / keys.norm(dim=-1).sum()
        moved: Tensor = share / (1 - share) * (values.mean(dim=0) - values).norm(dim=-1)
        return moved.tolist()

    check_tokens(CAOTEScorer(KeyNorms(), fast=True).score(context), context, expected, rel=1e-5)


@attrs.frozen
class KeyNorms(Scorer):
    """Norms of keys, which are not negative."""

    def score(self, context: LayerContext) -> Tensor:
        return -KeyNormScorer().score(context)
