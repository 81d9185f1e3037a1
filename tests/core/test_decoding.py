"""`DecodingEviction`, what scorers carry, and queries with positions of their own, by hand."""

from typing import Any

import attrs
import pytest
import torch

from kvpolicy import DecodingEviction, LayerContext
from kvpolicy.attention import causal_attention_sums
from kvpolicy.layer_inputs import AttentionSettings, DecodingInputs
from kvpolicy.policies import (
    H2O,
    AccumulatedAttentionScorer,
    AdaptiveHeadSelector,
    GQAGroupSelector,
    KeyDiffScorer,
    LastQueryScorer,
    PyramidSelector,
    RedundancyScorer,
    SinkAndRecentSelector,
    SnapKV,
    SumScorer,
    WindowMaxPoolScorer,
)
from tests.contexts import layer_context, with_decoding


def layer(length: int, queries: int) -> LayerContext:
    """Six query heads on two KV heads at a first prompt."""
    generator = torch.Generator().manual_seed(0)
    drawn, keys, values = (
        2 * torch.randn(1, heads, count, 5, generator=generator)
        for heads, count in ((6, queries), (2, length), (2, length))
    )
    return layer_context(
        keys, num_layers=1, queries=drawn, values=values, attention=AttentionSettings(5**-0.5)
    )


def test_queries_see_by_their_own_positions() -> None:
    """The softmax written out, of a query whose own token has been evicted."""
    context = layer(4, 2)
    positions = torch.tensor([[[0, 3, 7, 9], [1, 3, 8, 9]]])
    context = attrs.evolve(
        context,
        positions=positions,
        decoding=DecodingInputs(None, torch.tensor([[6, 9]])),
        seen_len=(10,),
    )
    sums = causal_attention_sums(context)
    for head in range(6):
        keys = context.keys[0, head // 3]
        want = torch.zeros(4)
        for query, place in enumerate((6, 9)):
            seen = (positions[0, head // 3] <= place).nonzero().flatten()
            logits = keys[seen] @ context.queries[0, head, query] * context.attention.scaling
            want[seen] += logits.softmax(dim=0)
        assert torch.allclose(sums[0, head], want, atol=1e-6)


def test_positions_of_the_last_slots_change_nothing() -> None:
    context = layer(19, 7)
    placed = with_decoding(context, query_positions=torch.arange(12, 19)[None])
    assert torch.allclose(causal_attention_sums(context), causal_attention_sums(placed))


def test_padded_queries_add_nothing() -> None:
    context = layer(19, 7)
    places = torch.arange(12, 19)[None].clone()
    places[0, :3] = -1
    placed = with_decoding(context, query_positions=places)
    assert torch.allclose(
        causal_attention_sums(placed), causal_attention_sums(context._showing(4)), atol=1e-6
    )


@pytest.mark.parametrize(
    "scorer",
    [
        AccumulatedAttentionScorer(),
        SumScorer([LastQueryScorer(), AccumulatedAttentionScorer()], weights=[0.0, 2.0]),
    ],
)
def test_sums_in_two_parts_are_those_at_once(scorer: Any) -> None:
    context = layer(12, 12)
    whole, carried = scorer.update(context)
    _, first = scorer.update(
        attrs.evolve(
            context,
            queries=context.queries[:, :, :8],
            decoding=DecodingInputs(None, torch.arange(8)[None]),
        )
    )
    rest = attrs.evolve(
        context._showing(4), decoding=DecodingInputs(first, torch.arange(8, 12)[None])
    )
    twice, carried_twice = scorer.update(rest)
    group = whole.unflatten(1, (2, -1)).mean(dim=2) if whole.shape[1] == 6 else whole
    group_twice = twice.unflatten(1, (2, -1)).mean(dim=2) if twice.shape[1] == 6 else twice
    assert torch.allclose(group, group_twice, atol=1e-5)
    assert torch.allclose(carried, carried_twice, atol=1e-5)


def test_a_choice_carries_on_what_is_kept_and_not() -> None:
    rule = H2O().decoding_rule(5)
    kept, carried = rule.decide(layer(12, 12))
    assert kept.shape == (1, 2, 8)  # the window is more than the budget
    assert carried is not None
    assert carried.shape == (1, 2, 12, 1)
    assert KeyDiffScorer().state_size == 0
    assert SnapKV().decoding_rule(5).decide(layer(12, 8))[1] is None


def test_a_prompt_is_looked_at_whole_where_its_sums_are_carried() -> None:
    assert SnapKV().num_queries == 8
    assert SnapKV(decoding=64).num_queries == 8
    assert SnapKV(decoding=H2O().decoding_rule(64)).num_queries is None
    context = layer(40, 40)
    both = SnapKV(retention_tokens=16, decoding=H2O().decoding_rule(64)).decide(context)
    alone = SnapKV(retention_tokens=16).decide(context._showing(8))
    assert torch.equal(both.kept, alone.kept)
    assert alone.state is None
    assert both.state is not None


@pytest.mark.parametrize(
    ("selector", "most"),
    [
        (GQAGroupSelector(retention_tokens=64), 64),
        (GQAGroupSelector(retention_tokens=4, window_size=8, protect=3), 11),
        (SinkAndRecentSelector(retention_tokens=64), 64),
        (PyramidSelector(retention_tokens=64), None),
        (AdaptiveHeadSelector(retention_tokens=64), None),
    ],
)
def test_the_most_that_is_held(selector: Any, most: int | None) -> None:
    assert DecodingEviction(WindowMaxPoolScorer(), selector).most_tokens == most


def test_copies_are_held_against_each_other_and_the_newest_is_kept() -> None:
    """Three keys alike, one of its own; attention does not count."""
    keys = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, -1.0]])
    context = layer_context(keys[None, None], queries=torch.zeros(1, 1, 1, 2))
    scores = RedundancyScorer(window_size=1, kernel_size=1, importance=0.0).score(context)[0, 0]
    # Of each copy the newest other one does not count: 0 and 1 have 3, 3 has 1. So 0 has 1 and 3,
    # less nothing of 1; 1 has 0 and 3 of which 3 leaves it out; 3 is what 0 and 1 leave out.
    sums = torch.tensor([2.0, 1.0, -1.0, 0.0, -1.0])
    want = -(sums / 5).softmax(dim=0)
    assert torch.allclose(scores[:4], want[:4])
    assert scores[4] == 0
