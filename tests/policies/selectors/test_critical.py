"""Two stages of one budget: on paper, alone and around Ada-KV."""

import attrs
import pytest
import torch
from torch import Tensor

from kvpolicy import CachePolicy, LayerContext
from kvpolicy.policies import (
    AdaptiveHeadSelector,
    CriticalKV,
    CriticalSelector,
    FirstLayersWholeSelector,
    GQAGroupSelector,
    KeepAllSelector,
    PassAllPropagation,
    WindowMaxPoolScorer,
)
from kvpolicy.policies.selectors.critical import output_norms
from tests.contexts import with_layer
from tests.policies.scorers.support import layer_of, random_layer

HIDDEN = 7


def weights(seed: int = 0, heads: int = 6, value_dim: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(heads, value_dim, HIDDEN, generator=generator)


def test_on_paper() -> None:
    """Of four tokens beside the last, two by attention; the fifth's value outweighs the third's.

    Attention 5, 4, 3, 2, 1, 0 and norms 1, 1, 1, 1, 9, 1, by an output weight of 1 and -1 of which
    the second halves: 3 halves of each value, so that 3, 2 and 9 are left in the second stage.
    """
    values = torch.tensor([1.0, -1.0, 1.0, 1.0, -9.0, 1.0])[:, None]
    context = with_layer(
        layer_of(torch.ones(6, 1), values), output_weight=torch.tensor([[[1.0, -0.5]]])
    )
    saliency = torch.tensor([[[5.0, 4.0, 3.0, 2.0, 1.0, 0.0]]])
    torch.testing.assert_close(
        output_norms(context)[0, 0], torch.tensor([1.5, 1.5, 1.5, 1.5, 13.5, 1.5])
    )
    inner = GQAGroupSelector(retention_tokens=4, window_size=1)
    assert inner.select(saliency, context).tolist() == [[[0, 1, 2, 5]]]
    assert CriticalSelector(inner).select(saliency, context).tolist() == [[[0, 1, 4, 5]]]
    # Of four, the last and two by attention; of all, attention alone.
    assert CriticalSelector(inner, first_share=0.75).select(saliency, context).tolist() == [
        [[0, 1, 4, 5]]
    ]
    assert CriticalSelector(inner, first_share=1.0).select(saliency, context).tolist() == [
        [[0, 1, 2, 5]]
    ]
    large = CriticalSelector(inner, first_share=0.0, epsilon=1e6).select(saliency, context)
    assert large.tolist() == [[[0, 1, 4, 5]]]  # by values alone, the earlier of equals


def test_tokens_without_attention_compete_by_their_values() -> None:
    """Epsilon is added to the attention, not to the product: of zeros the largest value is kept."""
    values = torch.tensor([1.0, 3.0, 2.0, 1.0])[:, None]
    context = with_layer(layer_of(torch.ones(4, 1), values), output_weight=torch.ones(1, 1, 1))
    inner = GQAGroupSelector(retention_tokens=2, window_size=1)
    kept = CriticalSelector(inner, first_share=0.0).select(torch.zeros(1, 1, 4), context)
    assert kept.tolist() == [[[1, 3]]]


def test_around_ada_kv_heads_keep_their_numbers() -> None:
    context = with_layer(random_layer(6, (40, 21), query_len=4), output_weight=weights(2))
    scorer, inner = WindowMaxPoolScorer(4, kernel_size=3), AdaptiveHeadSelector(0.3, window_size=4)
    policy = CachePolicy(scorer, CriticalSelector(inner), PassAllPropagation())
    kept, base = policy.decide(context).kept, inner.select(scorer.score(context), context)
    counts = (base >= 0).sum(dim=-1)
    assert torch.equal((kept >= 0).sum(dim=-1), counts)
    assert len(set(counts.flatten().tolist())) > 2
    assert not torch.equal(kept, base)
    saliency = scorer.score(context).view(2, 3, 2, -1).mean(dim=2)
    for row in range(2):
        for head in range(3):
            count = int(counts[row, head])
            best = saliency[row, head].argsort(descending=True)[: max(int(count * 0.5) - 4, 0)]
            assert set(best.tolist()) <= set(kept[row, head].tolist())


def test_a_layer_without_output_weights_says_so() -> None:
    context = random_layer(0, (9,), query_len=8)
    with pytest.raises(ValueError, match="output_weight must be known"):
        CriticalKV(0.9).decide(context)


def test_a_bound_for_answers_goes_to_the_selector_within() -> None:
    bounded = CriticalKV(decoding=64)
    assert bounded.decoding is not None
    assert bounded.decoding.selector == CriticalSelector(GQAGroupSelector(retention_tokens=64))
    assert bounded.decoding.most_tokens == 64
    assert str(bounded) == "CriticalKV(decoding=64, retention_rate=0.1)"
    assert str(CriticalKV(retention_tokens=64, decoding=True)) == (
        "CriticalKV(decoding=64, retention_tokens=64)"
    )


def whole_context(layer_idx: int) -> LayerContext:
    return attrs.evolve(random_layer(1, (7, 4)), layer_idx=layer_idx, num_layers=4)


def test_the_first_layers_keep_everything() -> None:
    inner = GQAGroupSelector(retention_tokens=2, window_size=1)
    selector, saliency = FirstLayersWholeSelector(inner, whole_layers=2), torch.rand(2, 3, 7)
    for layer_idx in range(4):
        context = whole_context(layer_idx)
        kept = selector.select(saliency, context)
        if layer_idx < 2:
            assert torch.equal(kept, KeepAllSelector().select(None, context))
            assert torch.equal(selector.protected(context), context.valid)
        else:
            assert torch.equal(kept, inner.select(saliency, context))
    assert selector.kept_rates(4, context_len=20) == [1.0, 1.0, 0.1, 0.1]
    assert selector.budget is None
    assert not selector.is_bounded


def test_without_whole_layers_it_is_the_selector() -> None:
    inner = GQAGroupSelector(retention_tokens=2)
    selector = FirstLayersWholeSelector(inner, whole_layers=0)
    assert selector.budget == inner.budget
    assert selector.is_bounded
    assert FirstLayersWholeSelector(GQAGroupSelector(0.1), whole_layers=3).around(inner) == selector
