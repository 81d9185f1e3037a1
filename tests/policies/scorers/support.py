"""Layers for tests of scorers: of keys and values on paper, and of random rows with padding."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from kvpolicy import LayerContext
from kvpolicy.layer_inputs import AttentionSettings
from kvpolicy.rotary import PlainRotary
from tests.contexts import layer_context, with_layer

THETA = 100.0


def layer_of(keys: Tensor, values: Tensor | None = None, **changes: Any) -> LayerContext:
    """One row of one KV head at its first prompt, without queries; values are the keys if None."""
    values = keys if values is None else values
    return layer_context(keys[None, None], values=values[None, None], **changes)


def random_layer(
    seed: int, lens: tuple[int, ...], query_len: int = 0, head_dim: int = 5
) -> LayerContext:
    """Rows of 3 KV heads and 6 query heads at their first prompt, padded on the left.

    Padding holds numbers as large as any: what reads it is found out.
    """
    generator = torch.Generator().manual_seed(seed)
    batch, key_len = len(lens), max(lens)

    def normal(heads: int, length: int) -> Tensor:
        return 2 * torch.randn(batch, heads, length, head_dim, generator=generator)

    slots = torch.arange(key_len)
    positions = slots - (key_len - torch.tensor(lens))[:, None]
    positions = positions.clamp(min=-1)
    return LayerContext(
        layer_idx=1,
        num_layers=3,
        queries=normal(6, query_len),
        keys=normal(3, key_len),
        values=normal(3, key_len),
        positions=positions[:, None].expand(batch, 3, key_len).contiguous(),
        new_valid=positions >= 0,
        seen_len=lens,
        attention=AttentionSettings(head_dim**-0.5),
    )


def check_tokens(
    found: Tensor,
    context: LayerContext,
    slow: Callable[[int, int], Sequence[float]],
    **tolerance: float,
) -> None:
    """Each head has found for the tokens that it holds what ``slow(row, head)`` says."""
    group = found.shape[1] // context.kv_heads
    for row in range(context.batch):
        for head in range(found.shape[1]):
            held = context.valid[row, head // group]
            expected = pytest.approx(slow(row, head), **tolerance)
            assert found[row, head][held].tolist() == expected


def held_by(context: LayerContext, row: int, head: int) -> tuple[Tensor, Tensor]:
    """The keys and the values of the tokens that a head of a row holds."""
    held = context.valid[row, head]
    return context.keys[row, head][held], context.values[row, head][held]


def turning(seed: int, lens: tuple[int, ...], query_len: int) -> LayerContext:
    """Padded rows with a rotary embedding."""
    context = random_layer(seed, lens, query_len, head_dim=6)
    return with_layer(context, rotary=PlainRotary(6, THETA))


def in_a_later_turn(context: LayerContext) -> LayerContext:
    """Three new tokens after what two rows hold of 40 and 16; heads hold unlike tokens."""
    positions = torch.full((2, 3, 9), -1)
    positions[0, :, :6] = torch.tensor(
        [[0, 5, 9, 11, 30, 39], [1, 2, 8, 9, 10, 11], [4, 5, 6, 7, 8, 9]]
    )
    positions[0, :, 6:] = torch.tensor([40, 41, 42])
    positions[1, :, 4:] = torch.tensor([3, 15, 16, 17, 18])
    positions[1, 1, 4] = -1
    return attrs.evolve(
        context,
        positions=positions,
        new_valid=torch.ones(2, 3, dtype=torch.bool),
        seen_len=(43, 19),
    )
