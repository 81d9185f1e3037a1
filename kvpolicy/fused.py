"""Sums and maxima of causal attention over all queries, without the matrix of queries and keys.

Two Triton kernels, for GPUs: the first finds each query's softmax denominator, the second goes
through the queries of a block of keys. Products are added up in float32, and always in the same
order. `kvpolicy.attention` says when they are used.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpolicy.context import LayerContext
from kvpolicy.layer_inputs import AttentionSettings

# Queries, and keys, that a program multiplies at once.
BLOCK = 64


def attention_columns(context: LayerContext, *, largest: bool) -> Tensor:
    """Return the sum, or the largest, of the causal attention that all queries give each key.

    Args:
        context: The layer; its queries are those of its last slots.
        largest: The largest weight instead of the sum.

    Returns:
        float32 ``[batch, query_heads, key_len]``, as `causal_attention_sums` and
        `causal_attention_peaks` in `kvpolicy.attention`.
    """
    queries, keys = (each.contiguous() for each in (context.queries, context.keys))
    valid = context.valid.contiguous().view(torch.uint8)
    batch, heads, count, dim = queries.shape
    totals = queries.new_empty(batch, heads, count, dtype=torch.float32)
    found = queries.new_empty(batch, heads, context.key_len, dtype=torch.float32)
    softcap, sinks = context.attention.softcap, context.attention.sinks
    numbers = (
        *(context.attention.scaling, softcap or 0.0),
        *(heads // context.kv_heads, count, context.key_len),
    )
    settings = {
        "DIM": dim,
        "WIDTH": max(triton.next_power_of_2(dim), 16),
        "CAPPED": softcap is not None,
        "SIZE": BLOCK,
    }
    with torch.cuda.device_of(keys):  # Triton's kernels run on the current device
        grid = triton.cdiv(count, BLOCK), batch * heads
        _denominators[grid](queries, keys, valid, totals, *numbers, **settings)
        if sinks is not None:
            totals = totals.logaddexp(sinks.float()[:, None])
        # A query of padding gives nothing.
        totals.masked_fill_(~context.query_valid[:, None], torch.inf)
        grid = triton.cdiv(context.key_len, BLOCK), batch * heads
        given = (queries, keys, valid, totals, found)
        _columns[grid](*given, *numbers, **settings, LARGEST=largest)
    return found


def check_kernels(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Raise an error if the kernels do not run, or give something else than PyTorch."""
    length, generator = 2 * BLOCK + 1, torch.Generator().manual_seed(0)
    drawn = torch.randn(3, 1, 2, length, head_dim, generator=generator).to(device, dtype)
    context = LayerContext(
        0,
        1,
        drawn[0],
        drawn[1],
        drawn[2],
        torch.arange(length, device=device).expand(1, 2, -1),
        torch.ones(1, length, dtype=torch.bool, device=device),
        (length,),
        attention=AttentionSettings(0.5),
    )
    logits = drawn[0].float() @ drawn[1].float().mT * 0.5
    later = torch.ones_like(logits, dtype=torch.bool).triu(1)
    weights = logits.masked_fill(later, -torch.inf).softmax(dim=-1)
    for largest, wanted in ((False, weights.sum(dim=2)), (True, weights.amax(dim=2))):
        found = attention_columns(context, largest=largest)
        torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)


@triton.jit
def _denominators(
    queries,
    keys,
    valid,
    totals,
    scaling,
    softcap,
    group,
    count,
    length,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    CAPPED: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Store the logs of the softmax's denominators of a block of queries of one head."""
    head = tl.program_id(1).to(tl.int64)  # of all rows
    own = head // group  # its KV head
    first = tl.program_id(0) * SIZE
    shown = first + tl.arange(0, SIZE)
    asking = _tile(queries + head * count * DIM, shown, count, DIM, WIDTH)
    top = tl.full([SIZE], -1e30, tl.float32)  # finite: a query of padding sees nothing
    total = tl.zeros([SIZE], tl.float32)
    for start in range(0, min(first + SIZE + length - count, length), SIZE):
        slots = start + tl.arange(0, SIZE)
        held = _tile(keys + own * length * DIM, slots, length, DIM, WIDTH)
        there = tl.load(valid + own * length + slots, mask=slots < length, other=0) != 0
        own_slots = shown + length - count
        logits = _logits(asking, held, own_slots, slots, there, scaling, softcap, CAPPED)
        higher = tl.maximum(top, tl.max(logits, 1))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(logits - higher[:, None]), 1)
        top = higher
    # The sum is at least 1, that of the largest itself, or 0 for a query that sees nothing.
    total = top + tl.log(tl.maximum(total, 1.0))
    tl.store(totals + head * count + shown, total, mask=shown < count)


@triton.jit
def _columns(
    queries,
    keys,
    valid,
    totals,
    found,
    scaling,
    softcap,
    group,
    count,
    length,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    CAPPED: tl.constexpr,
    SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Store the sum, or the largest, of the weights that a block of keys gets from one head."""
    head = tl.program_id(1).to(tl.int64)
    own = head // group
    slots = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    held = _tile(keys + own * length * DIM, slots, length, DIM, WIDTH)
    there = tl.load(valid + own * length + slots, mask=slots < length, other=0) != 0
    result = tl.zeros([SIZE], tl.float32)
    # The first query that sees one of the keys, in whole blocks.
    first = max(tl.program_id(0) * SIZE - (length - count), 0) // SIZE * SIZE
    for start in range(first, count, SIZE):
        shown = start + tl.arange(0, SIZE)
        asking = _tile(queries + head * count * DIM, shown, count, DIM, WIDTH)
        total = tl.load(totals + head * count + shown, mask=shown < count, other=float("inf"))
        own_slots = shown + length - count
        logits = _logits(asking, held, own_slots, slots, there, scaling, softcap, CAPPED)
        weights = tl.exp(logits - total[:, None])
        if LARGEST:
            result = tl.maximum(result, tl.max(weights, 0))
        else:
            result += tl.sum(weights, 0)
    tl.store(found + head * length + slots, result, mask=slots < length)


@triton.jit
def _tile(pointer, at, length, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Load vectors of one head by their places, ``[SIZE, WIDTH]``; 0 outside."""
    dims = tl.arange(0, WIDTH)
    there = (at < length)[:, None] & (dims < DIM)[None, :]
    return tl.load(pointer + at.to(tl.int64)[:, None] * DIM + dims[None, :], mask=there, other=0.0)


@triton.jit
def _logits(queries, keys, own, slots, there, scaling, softcap, CAPPED: tl.constexpr):
    """Return what the softmax gets of a tile; -inf where a query does not see a key."""
    logits = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scaling
    if CAPPED:
        logits = softcap - 2 * softcap / (tl.exp(2 * logits / softcap) + 1)  # softcap * tanh
    seen = (slots[None, :] <= own[:, None]) & there[None, :]
    return tl.where(seen, logits, -float("inf"))
