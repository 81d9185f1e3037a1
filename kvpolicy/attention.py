"""Computes the attention that scorers share, in float32."""

import functools
import warnings
from collections.abc import Iterator
from importlib.util import find_spec

import torch
from torch import Tensor

from kvpolicy.context import LayerContext
from kvpolicy.heads import sum_of_heads

__all__ = [
    "causal_attention_peaks",
    "causal_attention_sums",
    "group_mean",
    "query_key_products",
    "standardized",
]

# Bytes of attention logits computed at a time: on a CPU what its caches hold, on a GPU what keeps
# it busy. Scoring holds up to about four times as much: the logits, their softmax, a mask, and keys
# converted to float32, of at least one KV head.
BLOCK_BYTES = {"cpu": 1 << 22}
OTHER_BLOCK_BYTES = 1 << 28

# Where a fused kernel sums the attention of many queries.
FUSED_DEVICES = {"cuda"}

# Up to this many queries, it is not worth checking whether any key is padding, nor a fused kernel.
FEW_QUERIES = 64


def query_key_products(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the float32 dot products of every query with every key of its KV group, unscaled.

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
    products = grouped @ keys.float().transpose(-1, -2)
    return products.view(batch, query_heads, query_len, key_len)


def causal_attention_sums(context: LayerContext, query_weights: Tensor | None = None) -> Tensor:
    """Return, for each key, the sum of the causal attention weights from all queries.

    The softmax of a query runs over its own key and all earlier keys, without padding, and over
    the head's attention sink if the model has one; no key receives the sink's share. The sums are
    computed in blocks of KV heads and queries, so that the whole matrix is never in memory; those
    of many queries in half precision on a GPU by a fused kernel, where Triton can compile it.

    Args:
        context: The layer, with ``query_len`` trailing queries.
        query_weights: float32 ``[batch, query_len]``, how much each query counts; 1 if None.

    Returns:
        float32 ``[batch, query_heads, key_len]``; 0 on padding. Queries that are padding add
        nothing.

    Raises:
        ShapeError: The layer shows no queries; see `LayerContext.queries`.
    """
    if query_weights is None and _is_fused(context):
        from kvpolicy.fused import attention_columns

        return attention_columns(context, largest=False)
    sums: Tensor | None = None
    for block, shown, weights in _blocks(context):
        if query_weights is None:
            summed = weights.sum(dim=2)
        else:
            summed = (query_weights[:, None, None, shown] @ weights)[:, :, 0]
        if sums is None and summed.shape[1:] == (context.query_heads, context.key_len):
            sums = summed  # of all heads and keys, as for few queries
            continue
        sums = _nothing(context) if sums is None else sums
        sums[:, block, : weights.shape[-1]] += summed
    return _nothing(context) if sums is None else sums


def causal_attention_peaks(context: LayerContext) -> Tensor:
    """Return, for each key, the largest causal attention weight from any query.

    Args:
        context: The layer.

    Returns:
        float32 ``[batch, query_heads, key_len]``; 0 on padding.

    Raises:
        ShapeError: The layer shows no queries; see `LayerContext.queries`.
    """
    if _is_fused(context):
        from kvpolicy.fused import attention_columns

        return attention_columns(context, largest=True)
    peaks = _nothing(context)
    for block, _, weights in _blocks(context):
        seen = peaks[:, block, : weights.shape[-1]]
        torch.maximum(seen, weights.amax(dim=2), out=seen)
    return peaks


def _is_fused(context: LayerContext) -> bool:
    """True if a fused kernel computes what blocks would; in float32 these are exact."""
    keys = context.keys
    return (
        context.query_len > FEW_QUERIES
        and keys.device.type in FUSED_DEVICES
        and keys.dtype in (torch.float16, torch.bfloat16)
        and context.decoding.query_positions is None
        and _has_kernels(keys.device, keys.dtype, keys.shape[3])
    )


@functools.cache
def _has_kernels(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """True if the fused kernels can be compiled and give the right result, as is tried once."""
    if find_spec("triton") is None:
        return False
    try:
        from kvpolicy.fused import check_kernels

        check_kernels(device, dtype, head_dim)
    except Exception as error:  # of many kinds: no C compiler, a GPU that Triton does not know
        reason = str(error).strip().partition("\n")[0]
        warnings.warn(
            f"attention is summed in blocks, which takes longer, since on {device} with {dtype} "
            f"the kernel that Triton compiles fails: {type(error).__name__}: {reason}",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


def _nothing(context: LayerContext) -> Tensor:
    """Return a float32 zero tensor ``[batch, query_heads, key_len]`` to sum attention in."""
    queries = context.queries  # an error without queries, since zeros would look like a result
    shape = (*queries.shape[:2], context.key_len)
    return torch.zeros(shape, dtype=torch.float32, device=queries.device)


def _blocks(context: LayerContext) -> Iterator[tuple[slice, slice, Tensor]]:
    """Compute causal attention block by block; yield each block's heads, queries and weights.

    The keys are those up to the block's last query.
    """
    group = context.query_heads // context.kv_heads
    heads, count = _block_sizes(context)
    padded = _is_padded(context)
    for head in range(0, context.kv_heads, heads):
        own = context.keys[:, head : head + heads] if heads < context.kv_heads else context.keys
        keys = own.float()
        valid = None
        if padded:
            valid = context.valid[:, head : head + heads].repeat_interleave(group, dim=1)
        block = slice(head * group, (head + heads) * group)
        for start in range(0, context.query_len, count):
            shown = slice(start, start + count)
            yield block, shown, _block_weights(context, block, keys, valid, shown)


def _is_padded(context: LayerContext) -> bool:
    """True if any key or query may be padding; without padding, masking the weights is skipped."""
    if context._held_len is not None:
        return min(context._held_len) < context.key_len
    # The check waits for the device, which costs more than the weights of few queries.
    few = context.query_len <= FEW_QUERIES
    return few or not bool(context.valid.all() & context.query_valid.all())


def block_bytes(device: torch.device) -> int:
    """Return how many bytes of attention logits to compute at a time."""
    return BLOCK_BYTES.get(device.type, OTHER_BLOCK_BYTES)


def _block_sizes(context: LayerContext) -> tuple[int, int]:
    """Return how many KV heads and queries to process at a time, to limit memory use."""
    limit = block_bytes(context.keys.device)
    row_bytes = 4 * context.batch * context.key_len
    group = context.query_heads // context.kv_heads
    head_dim = context.keys.shape[-1]
    per_head = row_bytes * max(group * min(context.query_len, 8), head_dim)
    heads = min(max(limit // per_head, 1), context.kv_heads)
    return heads, max(limit // (row_bytes * group * heads), 1)


def _block_weights(
    context: LayerContext, heads: slice, keys: Tensor, valid: Tensor | None, shown: slice
) -> Tensor:
    """Compute causal attention weights of a block of queries over all keys up to its last query."""
    queries = context.queries
    if heads.stop - heads.start < context.query_heads:
        queries = queries[:, heads]
    if shown.stop - shown.start < context.query_len:
        queries = queries[:, :, shown]
    queries, count = queries.float() * context.attention.scaling, queries.shape[2]
    places = context.decoding.query_positions
    first = context.key_len - context.query_len + shown.start
    seen = context.key_len if places is not None else first + count
    logits = query_key_products(queries, keys if seen == keys.shape[2] else keys[:, :, :seen])
    logits, sinks = context.attention.capped(logits), context.attention.sinks
    # The lowest number instead of -inf: a padded query that sees nothing stays finite.
    lowest = torch.finfo(torch.float32).min
    if places is None:
        future = _later(count, logits.device, torch.is_inference_mode_enabled())
        logits.narrow(3, first, count).masked_fill_(future, lowest)
    else:
        group = context.query_heads // context.kv_heads
        held = context.positions[:, heads.start // group : -(-heads.stop // group), None]
        future = held > places[:, None, shown, None]  # [batch, kv_heads, query_len, key_len]
        logits.masked_fill_(future.repeat_interleave(group, dim=1), lowest)
    if valid is not None:
        logits.masked_fill_(~valid[:, :, None, :seen], lowest)
    if sinks is None:
        weights = logits.softmax(dim=-1)
    else:
        sinks = sinks[heads].float()[None, :, None, None].expand(*logits.shape[:3], 1)
        weights = torch.cat([logits, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    if valid is None:
        return weights
    query_valid = context.query_valid[:, None, shown, None]
    return weights.masked_fill_(~(valid[:, :, None, :seen] & query_valid), 0.0)


@functools.lru_cache(maxsize=8)
def _later(count: int, device: torch.device, inference: bool) -> Tensor:
    """Return which of ``count`` last keys are later than a query, ``[count, count]`` bool.

    It is made once for all layers; tensors of inference mode cannot be used outside of it.
    """
    return torch.ones(count, count, dtype=torch.bool, device=device).triu(1)


def group_mean(saliency: Tensor, kv_heads: int) -> Tensor:
    """Average per-query-head saliency over each KV group; per-KV-head saliency is returned as is.

    Args:
        saliency: ``[batch, query_heads or kv_heads, key_len]``.
        kv_heads: KV heads.

    Returns:
        ``[batch, kv_heads, key_len]``.
    """
    if saliency.shape[1] == kv_heads:
        return saliency
    batch, query_heads, key_len = saliency.shape
    grouped = saliency.view(batch, kv_heads, -1, key_len)
    return sum_of_heads(grouped) / (query_heads // kv_heads)


def neighbour_mean(scores: Tensor, kernel_size: int) -> Tensor:
    """Average ``[..., length]`` over tokens and those beside them; outside is 0."""
    if kernel_size == 1:
        return scores
    return torch.avg_pool1d(scores, kernel_size, stride=1, padding=kernel_size // 2)


def standardized(saliency: Tensor, scored: Tensor) -> Tensor:
    """Standardize saliency to mean 0, deviation 1 over a head's scored tokens; 0 if all are equal.

    Args:
        saliency: float ``[batch, heads, length]``.
        scored: bool ``[batch, heads or 1, length]``, the tokens whose mean and deviation are used.

    Returns:
        float32 of the same shape; tokens that are not scored are shifted and scaled too.
    """
    # In float64, since rows with padding must give the same result as without it.
    exact = saliency.double()
    count = scored.sum(dim=-1, keepdim=True).clamp(min=1)
    centered = exact - exact.masked_fill(~scored, 0.0).sum(dim=-1, keepdim=True) / count
    deviation = centered.masked_fill(~scored, 0.0).square().sum(dim=-1, keepdim=True) / count
    return (centered / (deviation.sqrt() + 1e-8)).float()
