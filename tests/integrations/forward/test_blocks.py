"""Attention over part of a prompt in blocks, against plain loops over queries."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from kvpolicy import attention
from kvpolicy.integrations.transformers.forward import blocks
from kvpolicy.integrations.transformers.forward.blocks import Blocks, LowerRight

BATCH, QUERY_HEADS, KV_HEADS, QUERY_LEN, BEFORE, HEAD_DIM = 2, 6, 3, 11, 17, 8
SCALING = 0.7


class Attention(nn.Module):
    """What attention functions read of a module."""

    num_key_value_groups = QUERY_HEADS // KV_HEADS
    is_causal = True


def drawn(before: int = BEFORE) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(BATCH, QUERY_HEADS, QUERY_LEN, HEAD_DIM, generator=draw) * 2
    key, value = torch.randn(
        2, BATCH, KV_HEADS, before + QUERY_LEN, HEAD_DIM, generator=draw
    ).unbind()
    return query, key, value


def by_loops(
    query: Tensor, key: Tensor, value: Tensor, places: Tensor, own: Tensor, window: int | None
) -> Tensor:
    """Every query of every head by itself, over the keys it sees."""
    found = torch.zeros(BATCH, QUERY_LEN, QUERY_HEADS, HEAD_DIM)
    for row in range(BATCH):
        for head in range(QUERY_HEADS):
            group = head // Attention.num_key_value_groups
            for at in range(QUERY_LEN):
                place = int(own[row, at])
                held = places[row, group if places.shape[1] > 1 else 0]
                seen = [
                    slot
                    for slot, other in enumerate(held.tolist())
                    if 0 <= other <= place and (window is None or other > place - window)
                ]
                weights = (key[row, group, seen] @ query[row, head, at] * SCALING).softmax(0)
                found[row, at, head] = weights @ value[row, group, seen]
    return found


def attended(how: Blocks, *tensors: Tensor) -> Tensor:
    module: Any = Attention()
    attend = AttentionInterface().get_interface(how.implementation, eager)
    return how.attend(attend, module, *tensors, scaling=SCALING, dropout=0.0)


def eager(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **how: Any
) -> tuple[Tensor, None]:
    key, value = (each.repeat_interleave(module.num_key_value_groups, 1) for each in (key, value))
    weights = (query @ key.transpose(2, 3) * how["scaling"] + mask).softmax(dim=-1)
    return (weights @ value).transpose(1, 2), None


@pytest.mark.parametrize("before", [0, 1, BEFORE])
@pytest.mark.parametrize("way", ["joined", "sdpa", "eager"])
@pytest.mark.parametrize("size", [64, 1 << 22])
def test_in_order(monkeypatch: pytest.MonkeyPatch, before: int, way: str, size: int) -> None:
    monkeypatch.setitem(attention.BLOCK_BYTES, "cpu", size)
    if way == "sdpa":
        monkeypatch.setattr(blocks, "_KERNEL", None)
    query, key, value = drawn(before)
    slots = torch.arange(before + QUERY_LEN).expand(BATCH, 1, -1)
    how = Blocks("eager" if way == "eager" else "sdpa", LowerRight(), None, slots[:, 0, before:])
    want = by_loops(query, key, value, slots, slots[:, 0, before:], None)
    assert torch.allclose(attended(how, query, key, value), want, atol=1e-5)


@pytest.mark.parametrize("window", [None, 3, 14])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("size", [64, 1 << 22])
def test_by_position(
    monkeypatch: pytest.MonkeyPatch, window: int | None, implementation: str, size: int
) -> None:
    """Heads hold unlike tokens with gaps, and a row is padded."""
    monkeypatch.setitem(attention.BLOCK_BYTES, "cpu", size)
    query, key, value = drawn()
    draw = torch.Generator().manual_seed(1)
    held = torch.stack(
        [torch.randperm(30, generator=draw)[:BEFORE].sort().values for _ in range(6)]
    ).view(BATCH, KV_HEADS, BEFORE)
    held[1, :, :4] = -1
    own = torch.arange(30, 30 + QUERY_LEN).expand(BATCH, -1)
    places = torch.cat([held, own[:, None].expand(-1, KV_HEADS, -1)], dim=2)
    how = Blocks(implementation, LowerRight(), places, own, window)
    want = by_loops(query, key, value, places, own, window)
    assert torch.allclose(attended(how, query, key, value), want, atol=1e-5)


def test_one_mask_serves_blocks_of_all_sizes() -> None:
    lower_right, query = LowerRight(), torch.zeros(1)
    large = lower_right.of(4, 9, query)
    small = lower_right.of(2, 5, query)
    assert small.data_ptr() != 0
    assert small.untyped_storage().data_ptr() == large.untyped_storage().data_ptr()
    assert (small == 0).tolist() == [[True] * 4 + [False], [True] * 5]
