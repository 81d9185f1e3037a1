"""The attention mathematics that scorers share; everything is scored in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpolicy.context import LayerContext

# Keys converted to float32 at a time: a copy of all of a long context's keys would show in the peak
# memory of a half-precision prefill.
_KEY_BLOCK = 16384


def query_key_products(queries: Tensor, keys: Tensor) -> Tensor:
    """Products of every query with every key of its KV group, in float32, unscaled.

    Args:
        queries: ``[batch, query_heads, query_len, head_dim]``.
        keys: ``[batch, kv_heads, key_len, head_dim]``; never repeated for the group.

    Returns:
        float32 ``[batch, query_heads, query_len, key_len]``.

    Example:
        >>> query_key_products(torch.ones(1, 2, 3, 5), torch.ones(1, 1, 7, 5)).shape
        torch.Size([1, 2, 3, 7])
    """
    batch, query_heads, query_len, head_dim = queries.shape
    kv_heads, key_len = keys.shape[1:3]
    grouped = queries.float().reshape(batch, kv_heads, -1, head_dim)  # group and query_len as one
    if keys.dtype == torch.float32:
        products = grouped @ keys.transpose(-1, -2)
    else:
        products = torch.empty(
            *grouped.shape[:3], key_len, dtype=torch.float32, device=queries.device
        )
        for start in range(0, key_len, _KEY_BLOCK):
            block = slice(start, start + _KEY_BLOCK)
            products[..., block] = grouped @ keys[:, :, block].float().transpose(-1, -2)
    return products.view(batch, query_heads, query_len, key_len)


def causal_attention_sums(context: LayerContext) -> Tensor:
    """Attention that the shown queries give each key, summed over the queries.

    Softmax over all keys that a query sees: its own, those before it, no padding.

    Args:
        context: The layer, with ``query_len`` trailing queries.

    Returns:
        float32 ``[batch, query_heads, key_len]``; 0 on padding. Queries that are padding add
        nothing.
    """
    key_len, query_len = context.key_len, context.query_len
    logits = query_key_products(context.queries, context.keys).mul_(context.scaling)
    slots = torch.arange(key_len, device=logits.device)
    causal = slots <= slots[key_len - query_len :, None]  # [query_len, key_len]
    group = context.query_heads // context.kv_heads
    valid = context.valid.repeat_interleave(group, dim=1)  # [batch, query_heads, key_len]
    visible = causal & valid[:, :, None, :]
    # The lowest number instead of -inf: a padded query that sees nothing stays finite.
    logits.masked_fill_(~visible, torch.finfo(torch.float32).min)
    weights = logits.softmax(dim=-1)
    weights.masked_fill_(~(context.query_valid[:, None, :, None] & visible), 0.0)
    return weights.sum(dim=2)


def group_mean(saliency: Tensor, kv_heads: int) -> Tensor:
    """Mean over the query heads of each KV group; a saliency per KV head is returned as it is.

    Args:
        saliency: ``[batch, query_heads or kv_heads, key_len]``.
        kv_heads: KV heads.

    Returns:
        ``[batch, kv_heads, key_len]``.
    """
    if saliency.shape[1] == kv_heads:
        return saliency
    batch, _, key_len = saliency.shape
    return saliency.view(batch, kv_heads, -1, key_len).mean(dim=2)
