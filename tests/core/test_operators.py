"""Scorers joined by operators are those of `SumScorer` and `MaxScorer`."""

import attrs
import pytest
import torch
from torch import Tensor

from kvpolicy import CachePolicy, LayerContext, Scorer, policies
from kvpolicy.description import describe, from_description
from kvpolicy.policies import (
    GQAGroupSelector,
    KeyNormScorer,
    LastQueryScorer,
    MaxScorer,
    PassAllPropagation,
    SumScorer,
    WindowMaxPoolScorer,
)
from tests.policies.scorers.support import random_layer

A, B, C = KeyNormScorer(), WindowMaxPoolScorer(4), LastQueryScorer()

JOINED: dict[str, tuple[Scorer, Scorer]] = {
    "a + b": (A + B, SumScorer([A, B])),
    "a + b + c": (A + B + C, SumScorer([A, B, C])),
    "a + (b + c)": (A + (B + C), SumScorer([A, B, C])),
    "0.5 * a": (0.5 * A, SumScorer([A], weights=[0.5])),
    "a * 2": (A * 2, SumScorer([A], weights=[2.0])),
    "0.5 * a + b": (0.5 * A + B, SumScorer([A, B], weights=[0.5, 1.0])),
    "a + -3 * b": (A + -3 * B, SumScorer([A, B], weights=[1.0, -3.0])),
    "0.5 * (a + 4 * b) * 3": (0.5 * (A + 4 * B) * 3, SumScorer([A, B], weights=[1.5, 6.0])),
    "tensor * a": (torch.tensor(0.25) * A, SumScorer([A], weights=[0.25])),
    "a | b": (A | B, MaxScorer([A, B])),
    "a | b | c": (A | B | C, MaxScorer([A, B, C])),
    "a | (b | c)": (A | (B | C), MaxScorer([A, B, C])),
    "a | 2 * b": (A | 2 * B, MaxScorer([A, SumScorer([B], weights=[2.0])])),
    "(a | b) + c": ((A | B) + C, SumScorer([MaxScorer([A, B]), C])),
    "a + a": (A + A, SumScorer([A, A])),
}


@pytest.mark.parametrize("joined", JOINED.values(), ids=JOINED)
def test_operators_make_the_scorers_that_are_written_out(joined: tuple[Scorer, Scorer]) -> None:
    made, expected = joined
    assert made == expected
    assert type(made) is type(expected)
    context = random_layer(7, (11, 6), query_len=5)
    assert torch.equal(made.score(context), expected.score(context))
    assert eval(str(made), vars(policies)) == made  # what is printed can be read
    assert eval(repr(made), vars(policies)) == made


def test_what_operators_compute() -> None:
    context = random_layer(3, (9, 4), query_len=4)
    other = WindowMaxPoolScorer(4, kernel_size=1).score(context)
    one = LastQueryScorer().score(attrs.evolve(context, queries=context.queries[:, :, -1:]))
    made = 0.5 * LastQueryScorer() + 3 * WindowMaxPoolScorer(4, kernel_size=1)
    torch.testing.assert_close(made.score(context), 0.5 * one + 3 * other)
    made = LastQueryScorer() | WindowMaxPoolScorer(4, kernel_size=1)
    assert torch.equal(made.score(context), one.maximum(other))


def test_a_policy_of_joined_scorers_is_described_and_built_again() -> None:
    scorer = (0.5 * A + B) | C
    policy = CachePolicy(scorer, GQAGroupSelector(0.2), PassAllPropagation())
    assert from_description(describe(policy)) == policy


def test_a_sum_is_described_by_its_module() -> None:
    """It has no name, since it cannot be built without scorers."""
    described = {
        "type": "kvpolicy.scorer:SumScorer",
        "fields": {"scorers": [{"type": "last_query_scorer", "fields": {}}], "weights": [2.0]},
    }
    policy = CachePolicy(2 * LastQueryScorer(), GQAGroupSelector(0.2), PassAllPropagation())
    description = describe(policy)
    assert description["fields"]["scorer"] == described
    assert from_description(description) == policy


@attrs.frozen
class Clipped(SumScorer):
    """A sum of a third party that is not the sum of its terms."""

    def score(self, context: LayerContext) -> Tensor:
        return super().score(context).clamp(max=1.0)


def test_a_subclass_of_a_sum_stays_whole() -> None:
    assert Clipped([A, B]) + C == SumScorer([Clipped([A, B]), C])
    assert 2 * Clipped([A, B]) == SumScorer([Clipped([A, B])], weights=[2.0])
