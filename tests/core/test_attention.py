"""The shared attention mathematics against loops over single numbers."""

import math
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from torch import Tensor

from kvpolicy import LayerContext, attention
from kvpolicy.attention import causal_attention_sums, group_mean, query_key_products
from kvpolicy.heads import Heads
from kvpolicy.testing import layer_contexts
from tests.contexts import layer_context, with_attention


def loop_over_single_numbers(context: LayerContext) -> list[list[list[float]]]:
    group = context.query_heads // context.kv_heads
    sums = torch.zeros(context.batch, context.query_heads, context.key_len).tolist()
    for row in range(context.batch):
        for head in range(context.query_heads):
            valid = context.valid[row, head // group].tolist()
            keys = context.keys[row, head // group].double()
            sinks = context.attention.sinks
            sink = 0.0 if sinks is None else math.exp(float(sinks[head]))
            for index in range(context.query_len):
                if not context.query_valid[row, index]:
                    continue
                own = context.key_len - context.query_len + index
                query = context.queries[row, head, index].double()
                weights = [
                    math.exp(float(query @ keys[slot]) * context.attention.scaling)
                    if valid[slot]
                    else 0.0
                    for slot in range(own + 1)
                ]
                for slot, weight in enumerate(weights):
                    sums[row][head][slot] += weight / (sum(weights) + sink)
    return sums


@pytest.mark.parametrize("sunk", [False, True])
@given(context=layer_contexts(5))
def test_attention_sums(sunk: bool, context: LayerContext) -> None:
    """What a sink takes no key gets."""
    if sunk:
        context = with_attention(context, sinks=torch.linspace(-2, 3, context.query_heads))
    sums = causal_attention_sums(context)
    assert sums.dtype == torch.float32
    expected = torch.tensor(loop_over_single_numbers(context))
    torch.testing.assert_close(sums, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("block_bytes", [1, 300, 2000])
@pytest.mark.parametrize("sinks", [None, torch.linspace(-2, 3, 6)], ids=["no_sinks", "sinks"])
def test_blocks_do_not_show(
    monkeypatch: pytest.MonkeyPatch, block_bytes: int, sinks: Tensor | None
) -> None:
    """One query of one head at a time, some, and all of them; each head has its own sink."""
    drawn = context(queries=torch.randn(2, 6, 4, 5), keys=torch.randn(2, 2, 11, 5))
    drawn = with_attention(drawn, sinks=sinks)
    whole = causal_attention_sums(drawn)
    torch.testing.assert_close(whole, torch.tensor(loop_over_single_numbers(drawn)))
    monkeypatch.setitem(attention.BLOCK_BYTES, "cpu", block_bytes)
    torch.testing.assert_close(causal_attention_sums(drawn), whole)


def test_products_in_half_precision_are_exact_in_float32() -> None:
    queries = torch.randn(2, 6, 3, 5).to(torch.bfloat16)
    keys = torch.randn(2, 2, 11, 5).to(torch.bfloat16)
    expected = queries.float() @ keys.float().repeat_interleave(3, dim=1).transpose(-1, -2)
    torch.testing.assert_close(query_key_products(queries, keys), expected)


def test_group_mean() -> None:
    saliency = torch.arange(6.0)[None, :, None].expand(1, 6, 2)
    assert group_mean(saliency, 2)[0, :, 0].tolist() == [1.0, 4.0]
    assert group_mean(saliency, 6) is saliency


def context(**changes: Any) -> LayerContext:
    keys = torch.zeros(2, 2, 11, 5)
    given = {
        "queries": torch.zeros(2, 6, 3, 5),
        "values": torch.zeros(2, 2, 11, 7),
        "new_valid": torch.ones(2, 4, dtype=torch.bool),
    }
    return attrs.evolve(layer_context(keys, **given), **changes)


def test_many_queries_with_and_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """More queries than for which padding is masked without asking whether there is any."""
    monkeypatch.setattr(attention, "FEW_QUERIES", 2)
    alone = context(queries=torch.randn(2, 6, 4, 5), keys=torch.randn(2, 2, 11, 5))
    padded = attrs.evolve(
        alone,
        positions=torch.arange(-3, 8).clamp(min=-1).expand(2, 2, 11),
        new_valid=torch.tensor([[False, True, True, True]] * 2),
    )
    for drawn in (alone, padded):
        weights = torch.rand(2, 4)
        sums = causal_attention_sums(drawn)
        torch.testing.assert_close(sums, torch.tensor(loop_over_single_numbers(drawn)))
        whole = torch.zeros_like(sums)
        for index in range(4):
            one = torch.zeros(2, 4)
            one[:, index] = weights[:, index]
            whole += causal_attention_sums(drawn, one)
        torch.testing.assert_close(causal_attention_sums(drawn, weights), whole)
        assert not sums.equal(whole)
    assert not sums[..., :3].any()


@pytest.mark.parametrize("heads", [5, 7, 16])
@pytest.mark.parametrize("length", [41, 103])
def test_tokens_that_are_equal_in_all_heads_stay_equal(heads: int, length: int) -> None:
    """Which of them is kept is by their order, wherever padding moves them."""
    for seed in range(10):
        one = torch.rand(2, heads, 1, generator=torch.Generator().manual_seed(seed))
        saliency = one.expand(2, heads, length).contiguous()
        for mean in (group_mean(saliency, 1)[:, 0], Heads().mean(saliency)):
            assert torch.equal(mean, mean[:, :1].expand(2, length))
            torch.testing.assert_close(mean[:, 0], one.mean(dim=1)[:, 0])
