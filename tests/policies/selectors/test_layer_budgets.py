"""PyramidKV and AdaKV: budgets that layers or heads share, on paper and against slow loops."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy import CachePolicy, LayerContext
from kvpolicy.policies import (
    AdaptiveHeadSelector,
    GQAGroupSelector,
    PyramidSelector,
    TokenSelectivePropagation,
    WindowMaxPoolScorer,
)
from kvpolicy.testing import layer_contexts, saliencies
from tests import reference
from tests.contexts import layer_context, of_new
from tests.policies.views import slots_of, view_of
from tests.reference.methods import LayerView


def prompt(key_len: int, *, kv_heads: int = 1, **changes: Any) -> LayerContext:
    """A first prompt of one row, whose keys do not matter."""
    return layer_context(torch.zeros(1, kv_heads, key_len, 3), **{"num_layers": 4, **changes})


@pytest.mark.parametrize(
    ("tokens", "seen_len", "num_layers", "shape", "expected"),
    [
        # A window of 2: 8 free places a layer. 8 * 3/4 * 3/3 = 6 and 8 * 3/4 * 1/3 = 2 more.
        (10, 20, 4, {"beta": 4}, [16, 12, 8, 4]),
        # 14 tokens, 12 beside the window: the first layer has room for 4 more, not for 6.
        (10, 14, 4, {"beta": 4}, [14, 12, 8, 6]),
        # 12 tokens: 2 of 6 in the first layer; all 2 of 2 fit in the second.
        (10, 12, 4, {"beta": 4}, [12, 12, 8, 8]),
        (10, 20, 3, {"beta": 4}, [16, 10, 4]),
        (10, 20, 2, {"beta": 4}, [16, 4]),
        (10, 20, 1, {"beta": 4}, [10]),
        (10, 20, 4, {"beta": 1}, [10, 10, 10, 10]),
        # 7 free: 7 * 19 * 3 // 60 = 6 and 7 * 19 * 1 // 60 = 2 more.
        (9, 100, 4, {"beta": 20}, [15, 11, 7, 3]),
        (2, 20, 4, {"beta": 20}, [2, 2, 2, 2]),
        (99, 20, 4, {"beta": 20}, [20, 20, 20, 20]),
        # A floor. 13 free places; 9 * 3 // 3 more or fewer leave the last layer 4.
        (15, 512, 4, {"floor_tokens": 4}, [24, 18, 12, 6]),
        (15, 512, 8, {"floor_tokens": 4}, [24, 21, 18, 16, 14, 12, 9, 6]),
        (6, 512, 4, {"floor_tokens": 4}, [6, 6, 6, 6]),
        (5, 512, 4, {"floor_tokens": 4}, [5, 5, 5, 5]),
        (2, 512, 4, {"floor_tokens": 4}, [2, 2, 2, 2]),
        # 100 * 19 // 20 = 95 more leave 5 of 100, more than the floor.
        (102, 512, 3, {"floor_tokens": 4}, [197, 102, 7]),
        # There is no room for 9 more.
        (15, 20, 2, {"floor_tokens": 4}, [20, 10]),
        (15, 512, 1, {"floor_tokens": 4}, [15]),
    ],
)
def test_pyramid_counts_on_paper(
    tokens: int, seen_len: int, num_layers: int, shape: dict[str, int], expected: list[int]
) -> None:
    """Tokens that each layer keeps of a prompt, all of which reaches it."""
    selector = PyramidSelector(retention_tokens=tokens, window_size=2, **shape)
    for layer_idx, count in enumerate(expected):
        context = prompt(seen_len, layer_idx=layer_idx, num_layers=num_layers)
        assert selector.select(torch.rand(1, 1, seen_len), context).shape[-1] == count


@given(
    floor_tokens=st.integers(0, 50),
    seen_len=st.integers(1, 3000),
    tokens=st.integers(1, 3000),
    more=st.integers(1, 50),
    window_size=st.integers(0, 70),
    beta=st.integers(1, 40),
    num_layers=st.integers(1, 40),
)
def test_all_layers_of_a_pyramid_keep_what_as_many_equal_layers_would(
    tokens: int, more: int, seen_len: int, window_size: int, num_layers: int, **shape: int
) -> None:
    fixed = min(window_size, seen_len)

    def kept(size: int) -> tuple[PyramidSelector, list[int]]:
        selector = PyramidSelector(None, window_size=window_size, retention_tokens=size, **shape)
        return selector, [
            selector.count(seen_len, fixed, index, num_layers) for index in range(num_layers)
        ]

    selector, counts = kept(tokens)
    equal = min(seen_len, max(tokens, fixed, 1))
    assert sum(counts) == num_layers * equal
    assert counts == sorted(counts, reverse=True)
    assert max(fixed, 1) <= counts[-1]
    assert counts[-1] >= min(fixed + shape["floor_tokens"], equal)
    assert counts[0] <= seen_len
    assert all(a + b == 2 * equal for a, b in zip(counts, reversed(counts), strict=True))
    rates = selector.kept_rates(num_layers, seen_len)
    assert rates == [count / seen_len for count in counts]
    # No layer loses by a larger budget.
    assert all(a <= b for a, b in zip(counts, kept(tokens + more)[1], strict=True))


@given(data=st.data(), context=layer_contexts(0), rate=st.sampled_from([0.05, 0.2, 0.5, 1.0]))
def test_a_layer_of_a_pyramid_chooses_as_under_a_budget_of_its_own(
    data: st.DataObject, context: LayerContext, rate: float
) -> None:
    """Whatever the layer holds: heads with unlike numbers, a later turn, tokens dropped before."""
    saliency = data.draw(saliencies(context))
    selector = PyramidSelector(rate, window_size=3, beta=3)
    kept = selector.select(saliency, context)
    for row in range(context.batch):
        for head in range(context.kv_heads):
            fixed = min(int(context.valid[row, head].sum()), 3)
            seen = context.seen_len[row]
            count = selector.count(seen, fixed, context.layer_idx, context.num_layers)
            own = GQAGroupSelector(retention_tokens=count, window_size=3).select(saliency, context)
            chosen = kept[row, head][kept[row, head] >= 0]
            assert chosen.tolist() == own[row, head][own[row, head] >= 0].tolist()


def test_rates_of_a_pyramid_over_a_long_prompt() -> None:
    selector = PyramidSelector(0.2, window_size=4, beta=4)
    assert selector.kept_rates(3) == pytest.approx([0.35, 0.2, 0.05])
    assert selector.kept_rates(1) == [0.2]
    # 0.6 + 0.45 is more than there is.
    assert PyramidSelector(0.6, beta=4).kept_rates(2) == pytest.approx([1.0, 0.2])
    exact = selector.kept_rates(4, context_len=100_000)
    assert exact == pytest.approx(selector.kept_rates(4), abs=1e-4)
    with pytest.raises(ValueError, match="context_len must be given if retention_tokens is"):
        PyramidSelector(retention_tokens=10).kept_rates(4)
    # 16 free places beside 4: twice 16 * 3 // 4 = 12 more or less; protected tokens are beside.
    tokens = PyramidSelector(retention_tokens=20, window_size=3, beta=4, protect=1)
    assert tokens.kept_rates(2, context_len=100) == [0.32, 0.08]


def test_the_saliency_of_a_head_is_that_of_its_group() -> None:
    """Query heads 0 and 1 share KV head 0: (0.5, 0.3, ..) on average, under 0.6 of KV head 1."""
    saliency = torch.tensor([[[0.9, 0.0, 0.0], [0.1, 0.6, 0.0], [0.6, 0.1, 0.0], [0.6, 0.1, 0.0]]])
    context = attrs.evolve(prompt(3, kv_heads=2), queries=torch.zeros(1, 4, 0, 3))
    selector = AdaptiveHeadSelector(retention_tokens=1, window_size=0, floor=0.0)
    assert selector.select(saliency, context).tolist() == [[[0], [0]]]
    kept = selector.select(saliency * torch.tensor([1.0, 1.0, 0.4, 0.4])[:, None], context)
    # 0.5 and 0.3 of head 0, 0.24 of head 1, which keeps nothing
    assert kept.tolist() == [[[0, 1], [-1, -1]]]


def test_the_head_with_most_protected_tokens_says_how_many_places_are_free() -> None:
    """Head 0 holds both first tokens, head 1 neither: 4 less 3 leaves one place a head to share."""
    context = prompt(
        5,
        kv_heads=2,
        positions=torch.tensor([[[-1, -1, 0, 1, 19], [2, 5, 9, 12, 19]]]),
        new_valid=of_new(1),
        seen_len=(20,),
    )
    selector = AdaptiveHeadSelector(None, window_size=1, retention_tokens=4, floor=0.0, protect=2)
    kept = selector.select(torch.ones(1, 2, 5), context)
    assert kept.tolist() == [[[2, 3, 4], [0, 1, 4]]]


@dataclass(frozen=True)
class Given(reference.AdaKV):
    """An AdaKV by saliencies that are given, per KV head of all entries."""

    scores: Sequence[Sequence[float]] = ()

    def head_scores(self, layer: LayerView) -> list[list[float]]:
        pairs = zip(self.scores, layer.entries, strict=True)
        return [list(row[: max(len(held) - self.window_size, 0)]) for row, held in pairs]


@given(
    data=st.data(),
    context=layer_contexts(0),
    rate=st.sampled_from([0.01, 0.2, 0.5, 1.0]),
    window_size=st.integers(0, 5),
    floor=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
)
def test_adaptive_heads_against_the_slow_reference(
    data: st.DataObject, context: LayerContext, rate: float, window_size: int, floor: float
) -> None:
    saliency = data.draw(saliencies(context))
    selector = AdaptiveHeadSelector(rate, window_size=window_size, floor=floor)
    kept = selector.select(saliency, context)
    longest = 0
    for row in range(context.batch):
        found = [slots_of(kept[row, head], context, row, head) for head in range(context.kv_heads)]
        scores = [
            saliency[row, head, context.valid[row, head]].tolist()
            for head in range(context.kv_heads)
        ]
        method = Given(rate, window_size, floor=floor, scores=scores)
        assert found == method.choose(view_of(context, row)).kept
        longest = max(longest, *map(len, found))
    assert kept.shape[-1] == longest


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize(
    ("floor", "expected"), [(0.5, [[0, 1, 2, 3, 4], [0]]), (0.7, [[0, 1, 2, 3], [0, 1]])]
)
def test_places_that_are_a_heads_own_are_rounded_down(
    floor: float, expected: list[list[int]], padding: int
) -> None:
    """Of three places for each head one or two; the most salient of all take the others."""
    positions = torch.arange(-padding, 5).clamp(min=-1).expand(1, 2, -1)
    context = prompt(
        5 + padding,
        kv_heads=2,
        positions=positions,
        new_valid=positions[:, 0] >= 0,
        seen_len=(5,),
        held_len=(5,),
    )
    rows = [[0.9, 0.8, 0.7, 0.6, 0.5], [0.3, 0.2, 0.1, 0.05, 0.04]]
    saliency = torch.tensor([[[1.0] * padding + row for row in rows]])
    selector = AdaptiveHeadSelector(retention_tokens=3, window_size=0, floor=floor)
    kept = selector.select(saliency, context)
    assert [slots_of(kept[0, head], context, 0, head) for head in range(2)] == expected


def test_rates_of_adaptive_heads_are_their_mean() -> None:
    selector = AdaptiveHeadSelector(0.25, window_size=2)
    assert selector.kept_rates(3) == [0.25] * 3
    tokens = AdaptiveHeadSelector(retention_tokens=5, window_size=4, protect=3)
    assert tokens.kept_rates(2, context_len=50) == [0.14, 0.14]
    kept = tokens.select(torch.rand(1, 5, 50), prompt(50, kv_heads=5))
    assert int((kept >= 0).sum()) / 5 / 50 == 0.14
    assert selector.budget is None


def test_under_a_drop_late_layers_keep_what_reaches_them() -> None:
    """0.2 of 100 tokens reach the layer: a pyramid of 0.3 would keep 31 in the middle."""
    policy = CachePolicy(
        WindowMaxPoolScorer(2),
        PyramidSelector(0.3, window_size=2),
        TokenSelectivePropagation(tsp_layer=0, tsp_rate=0.2, window_size=2),
    )
    context = prompt(
        20,
        layer_idx=2,
        num_layers=5,
        positions=torch.arange(0, 100, 5)[None, None],
        seen_len=(100,),
        queries=torch.zeros(1, 1, 2, 3),
    )
    assert policy.decide(context).kept.shape == (1, 1, 20)
