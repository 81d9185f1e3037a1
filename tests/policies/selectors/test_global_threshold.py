"""One threshold for all layers and heads, worked by hand."""

import attrs
import pytest
import torch
from torch import Tensor

from kvpolicy import CachePolicy, LayerContext
from kvpolicy.decision import DeferredLayer, kept_of_all
from kvpolicy.part_calls import DeferredChecks
from kvpolicy.policies import (
    GlobalThresholdSelector,
    GQAGroupSelector,
    KVzip,
    PassAllPropagation,
    PeakAttentionScorer,
)
from tests.contexts import layer_context


def layer(positions: list[list[list[int]]], *, seen: int, layer_idx: int = 0) -> LayerContext:
    """A layer of one query head for each KV head, ``[batch, kv_heads, key_len]``."""
    places = torch.tensor(positions)
    return layer_context(
        torch.ones(*places.shape, 3),
        layer_idx=layer_idx,
        positions=places,
        new_valid=places[:, 0] >= 0,
        seen_len=(seen,) * len(places),
    )


FIRST = layer([[[0, 1, 2, 3], [0, 1, 2, 3]]], seen=4)
# After a drop.
SECOND = layer([[[1, 3]]], seen=4, layer_idx=1)
SCORES = [
    torch.tensor([[[0.9, 0.1, 0.8, 0.2], [0.3, 0.7, 0.1, 0.1]]]),
    torch.tensor([[[0.6, 0.0]]]),
]


SAME = [torch.zeros_like(each) for each in SCORES]


@pytest.mark.parametrize(
    ("rate", "fixed", "scores", "expected"),
    [
        # Two of four for each head: six of ten; 0.9, 0.8, 0.7, 0.6, 0.3, 0.2 are the highest.
        (0.5, 0, SCORES, [[[0, 2, 3], [0, 1]], [[0]]]),
        # One of each head: three, all but one of a head.
        (0.25, 0, SCORES, [[[0, 2], [1]], [[]]]),
        # The last and the first of each head are four, five with the layer after the drop.
        (0.5, 1, SCORES, [[[0, 2, 3], [0, 3]], [[1]]]),
        # Of equals the lower layer, then head, then token.
        (0.25, 0, SAME, [[[0, 1, 2], []], [[]]]),
        (0.5, 0, SAME, [[[0, 1, 2, 3], [0, 1]], [[]]]),
    ],
)
def test_by_hand(
    rate: float, fixed: int, scores: list[Tensor], expected: list[list[list[int]]]
) -> None:
    selector = GlobalThresholdSelector(rate, window_size=fixed, protect=fixed)
    found = selector.select_together(scores, [FIRST, SECOND])
    assert [
        [[i for i in head if i >= 0] for head in kept[0].tolist()] for kept in found
    ] == expected


def test_a_layer_that_shares_what_it_stores_is_one_head() -> None:
    stored = (torch.ones(1, 1, 4, 2), torch.ones(1, 1, 4, 2))
    shared = attrs.evolve(FIRST, stored=stored)
    policy = CachePolicy(
        PeakAttentionScorer(), GlobalThresholdSelector(0.5, window_size=0), PassAllPropagation()
    )
    layers = [DeferredLayer.of(shared, SCORES[0]), DeferredLayer.of(SECOND, SCORES[1])]
    found = policy.decide_layers(layers)
    # The means are 0.6, 0.4, 0.45, 0.15; two and two of the heads there are.
    assert [each.tolist() for each in found] == [[[[0, 1, 2]]], [[[0]]]]


def test_rows_in_which_nothing_is_chosen_take_no_places() -> None:
    """Of two rows, one is beyond a layer's window, which says what it keeps of that layer."""
    rows = layer([[[0, 1, 2, 3]]] * 2, seen=4)
    scores = torch.tensor([[[0.9, 0.8, 0.7, 0.6]], [[0.9, 0.8, 0.7, 0.6]]])
    other = torch.tensor([[[0.5, 0.4, 0.3, 0.2]]] * 2)
    short = torch.tensor([True, False])[:, None, None]
    waiting = [DeferredLayer.of(rows, scores).among(short), DeferredLayer.of(rows, other)]
    first, second = kept_of_all(
        GlobalThresholdSelector(0.5, window_size=0), waiting, DeferredChecks()
    )
    assert first.tolist() == [[[0, 1, 2, 3]], [[-1, -1, -1, -1]]]
    assert second.tolist() == [[[-1, -1]], [[0, 1]]]


def test_a_head_without_a_token_to_choose() -> None:
    padded = layer([[[0, 1], [-1, -1]]], seen=2)
    kept = GlobalThresholdSelector(0.5, window_size=0).select(torch.ones(1, 2, 2), padded)
    assert kept.tolist() == [[[0], [-1]]]


def test_a_selector_that_is_asked_for_what_it_does_not_do() -> None:
    with pytest.raises(TypeError, match="select_together must be called only on a selector that"):
        GQAGroupSelector().select_together(SCORES[:1], [FIRST])


class OneTooFew(GlobalThresholdSelector):
    def select_together(self, *args: object) -> list[Tensor]:  # type: ignore[override]
        return super().select_together(*args)[1:]  # type: ignore[arg-type]


def test_what_is_chosen_is_checked() -> None:
    policy = CachePolicy(PeakAttentionScorer(), OneTooFew(0.5), PassAllPropagation())
    layers = [DeferredLayer.of(FIRST, SCORES[0]), DeferredLayer.of(SECOND, SCORES[1])]
    with pytest.raises(TypeError, match="must return a list of 2 tensors"):
        policy.decide_layers(layers)


def test_what_waits_holds_no_keys() -> None:
    policy = CachePolicy(PeakAttentionScorer(), GlobalThresholdSelector(), PassAllPropagation())
    context = attrs.evolve(FIRST, queries=torch.ones(1, 2, 4, 3))
    decision = policy.decide(context)
    assert decision.kept is None
    assert decision.undecided is not None
    waiting = decision.undecided.context
    assert [each.numel() for each in (waiting.keys, waiting.values, waiting._queries)] == [0, 0, 0]
    assert waiting.positions.equal(context.positions)
    assert decision.undecided.saliency is not None
    # With a second reading nothing is scored yet.
    again = KVzip().decide(context).undecided
    assert again is not None
    assert again.saliency is None


def test_estimates_are_of_the_mean() -> None:
    assert GlobalThresholdSelector(0.3).kept_rates(3) == [0.3] * 3
    assert GlobalThresholdSelector(0.3).budget is None
