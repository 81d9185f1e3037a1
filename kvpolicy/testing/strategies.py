"""Draws layer contexts and saliencies, also as hypothesis strategies.

Part of `kvpolicy.testing`, which exports the strategies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from kvpolicy.context import LayerContext
from kvpolicy.interfaces import Part
from kvpolicy.kinds import TokenKind
from kvpolicy.layer_inputs import AttentionSettings, LayerInputs
from kvpolicy.rotary import PlainRotary
from kvpolicy.testing.draws import Draws, strategy_of

if TYPE_CHECKING:
    from hypothesis import strategies as st

# Width of what a layer's output projection gives.
HIDDEN = 13
ALL = slice(None)


def layer_contexts(
    num_queries: int | None = None, part: Part | None = None
) -> st.SearchStrategy[LayerContext]:
    """Return a hypothesis strategy that draws `LayerContext` objects, to test policy parts with.

    Args:
        num_queries: Trailing queries to show, as `Scorer.num_queries`.
        part: What asks for history, a rotary embedding or output weights; None for nothing.

    Raises:
        ImportError: hypothesis is not installed.
    """
    return strategy_of(lambda draws: draw_context(draws, num_queries, part), "layer_contexts")


def draw_context(
    draws: Draws, num_queries: int | None = None, part: Part | None = None
) -> LayerContext:
    """Draw a random `LayerContext`.

    In a later turn the KV heads of a row may hold different numbers of tokens. Some layers say of
    which kind their tokens are. Every axis has a prime length of its own where it can, so that
    swapped axes do not pass. The arguments are those of `layer_contexts`.
    """
    batch = draws.integer(1, 3)
    kv_heads, group, head_dim = draws.choice([(1, 3, 5), (2, 1, 5), (3, 2, 7)])
    turns = part is not None and part.needs_rotary
    head_dim *= 2 if turns else 1  # channels are turned in pairs
    new_lens = [draws.integer(1, 37) for _ in range(batch)]
    held_lens = _draw_held_lens(draws, batch, kv_heads)
    forgotten = [draws.integer(0, 400) if any(held) else 0 for held in held_lens]
    layer_idx, num_layers = draws.choice([(0, 1), (1, 4), (2, 4), (4, 11)])
    generator = torch.Generator().manual_seed(draws.seed())
    dtype = draws.choice([torch.float32, torch.bfloat16])

    most_held = [max(held) for held in held_lens]
    key_len = max(held + new for held, new in zip(most_held, new_lens, strict=True))
    new_len = max(new_lens)
    seen = [sum(lens) for lens in zip(most_held, new_lens, forgotten, strict=True)]
    positions = torch.full((batch, kv_heads, key_len), -1)
    new_valid = torch.zeros(batch, new_len, dtype=torch.bool)
    for row, (of_heads, new, total) in enumerate(zip(held_lens, new_lens, seen, strict=True)):
        new_valid[row, new_len - new :] = True
        for head, held in enumerate(of_heads):
            kept = torch.randperm(total - new, generator=generator)[:held].sort().values
            positions[row, head, key_len - new - held : key_len - new] = kept
            positions[row, head, key_len - new :] = torch.arange(total - new, total)
    query_len = new_len if num_queries is None else min(num_queries, new_len)

    def normal(*shape: int) -> Tensor:
        # Scaled up so that attention is peaked, as it is in trained models.
        return (2 * torch.randn(shape, generator=generator)).to(dtype)

    before = 0 if part is None else min(part.history_layers, layer_idx)
    heads = draws.choice([kv_heads, kv_heads * group]) if before else kv_heads
    weighs = part is not None and part.needs_output_weight
    return LayerContext(
        layer_idx=layer_idx,
        num_layers=num_layers,
        queries=normal(batch, kv_heads * group, query_len, head_dim),
        keys=normal(batch, kv_heads, key_len, head_dim),
        values=normal(batch, kv_heads, key_len, head_dim),
        positions=positions,
        new_valid=new_valid,
        seen_len=tuple(seen),
        attention=AttentionSettings(head_dim**-0.5),
        kinds=_draw_kinds(draws, positions),
        layer=LayerInputs(
            # In steps whose sums are the same in any order.
            history=tuple(
                torch.randint(1 << 12, (batch, heads, new_len), generator=generator) / (1 << 12)
                for _ in range(before)
            ),
            rotary=PlainRotary(head_dim) if turns else None,
            output_weight=normal(kv_heads * group, head_dim, HIDDEN) if weighs else None,
        ),
    )


def _draw_kinds(draws: Draws, positions: Tensor) -> Tensor | None:
    """Draw token kinds for a test layer: None, or one of two kinds for each token."""
    share = draws.choice([None, 0.1, 0.6, 1.0])
    if share is None:
        return None
    generator = torch.Generator().manual_seed(draws.seed())
    size = (len(positions), int(positions.max()) + 1)
    images = torch.rand(size, generator=generator) < share
    of_rows = torch.where(images, TokenKind.IMAGE, TokenKind.TEXT).to(torch.int8)
    flat = positions.flatten(1)
    return of_rows.gather(1, flat.clamp(min=0)).masked_fill(flat < 0, -1).view_as(positions)


def _draw_held_lens(draws: Draws, batch: int, kv_heads: int) -> list[list[int]]:
    """Draw how many tokens each row and KV head of a layer holds: 0, all equal, or different."""
    if not draws.choice([False, True]):
        return [[0] * kv_heads] * batch
    held = [draws.integer(1, 17) for _ in range(batch)]
    if not draws.choice([False, True]):
        return [[most] * kv_heads for most in held]
    return [[max(most - draws.integer(0, 16), 0) for _ in range(kv_heads)] for most in held]


def saliencies(context: LayerContext) -> st.SearchStrategy[Tensor]:
    """Return a hypothesis strategy for a layer's saliency ``[batch, kv_heads, key_len]``.

    Some have ties.

    Args:
        context: The layer.

    Raises:
        ImportError: hypothesis is not installed.
    """
    return strategy_of(lambda draws: draw_saliency(draws, context), "saliencies")


def draw_saliency(draws: Draws, context: LayerContext) -> Tensor:
    """Draw a layer's saliency ``[batch, kv_heads, key_len]``; some have ties."""
    shape = (context.batch, context.kv_heads, context.key_len)
    generator = torch.Generator().manual_seed(draws.seed())
    levels = draws.choice([1, 2, 5, 1 << 20])
    return torch.randint(levels, shape, generator=generator).float() / levels


def row_alone(context: LayerContext, row: int) -> LayerContext:
    """Return one batch row of a layer context as a batch of its own, without padding."""
    held = int(context.valid[row].sum(dim=-1).max())
    new = int(context.new_valid[row].sum())
    return cut(
        context,
        rows=slice(row, row + 1),
        slots=slice(context.key_len - held, None),
        queries=slice(max(context.query_len - new, 0), None),
        new=slice(context.new_len - new, None),
    )


def cut(
    context: LayerContext,
    *,
    rows: slice = ALL,
    heads: slice = ALL,
    slots: slice = ALL,
    queries: slice = ALL,
    new: slice = ALL,
) -> LayerContext:
    """Copy a part of a layer: of its rows, KV heads, slots, last queries and new tokens."""
    first, end, _ = heads.indices(context.kv_heads)
    layer, stored, held_len = context.layer, context._stored, context._held_len

    def of_heads(tensor: Tensor, axis: int) -> Tensor:
        """Copy the part of a tensor that has one or more heads for each KV head."""
        width = tensor.shape[axis] // context.kv_heads
        return tensor.narrow(axis, first * width, (end - first) * width).clone()

    def of_keys(tensor: Tensor) -> Tensor:
        return of_heads(tensor[rows, :, slots], 1)

    if stored is not None:
        first_stored, second_stored = (each[rows, :, slots].clone() for each in stored)
        stored = (first_stored, second_stored)
    weight = layer.output_weight
    return attrs.evolve(
        context,
        queries=of_heads(context._queries[rows, :, queries], 1),
        keys=of_keys(context.keys),
        values=of_keys(context.values),
        positions=of_keys(context.positions),
        kinds=None if context._kinds is None else of_keys(context._kinds),
        new_valid=context.new_valid[rows, new].clone(),
        seen_len=context.seen_len[rows],
        stored=stored,
        held_len=None if held_len is None else held_len[rows],
        layer=attrs.evolve(
            layer,
            output_weight=None if weight is None else of_heads(weight, 0),
            history=tuple(of_heads(each[rows, :, new], 1) for each in layer.history),
        ),
    )
