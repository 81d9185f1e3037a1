"""Attention masks by position, for layers whose keys are no longer those of the whole context."""

from __future__ import annotations

import torch
from torch import Tensor

# The forms of mask that are known here, and so the attention implementations that are supported.
IMPLEMENTATIONS = ("eager", "sdpa")


def position_mask(
    key_positions: Tensor,
    query_positions: Tensor,
    *,
    query_heads: int | None,
    implementation: str,
    dtype: torch.dtype,
    window: int | None = None,
) -> Tensor:
    """Mask under which every query sees the keys at its position and before.

    Args:
        key_positions: ``[batch, kv_heads, key_len]`` int64, -1 on slots without a token.
        query_positions: ``[batch, query_len]`` int64, -1 on padding. The layer's own tokens are
            the last ``query_len`` keys.
        query_heads: Query heads, where the heads of a row may hold different numbers of tokens;
            None where they do not.
        implementation: ``"sdpa"`` or ``"eager"``.
        dtype: The layer's dtype, for additive masks.
        window: Positions a query sees, its own among them; None for all before it.

    Returns:
        ``[batch, 1 or query_heads, query_len, key_len]``: bool, True where the query sees the key,
        for sdpa; 0 there and the lowest number elsewhere, in ``dtype``, for eager.
    """
    if query_heads is None:
        # Heads hold different tokens, but what is not new lies before all queries.
        key_positions = key_positions[:, :1]
    else:
        group = query_heads // key_positions.shape[1]
        key_positions = key_positions.repeat_interleave(group, dim=1)
    keys, queries = key_positions[:, :, None, :], query_positions[:, None, :, None]
    # A padded query sees everything: what it yields is never used, but it has to stay finite,
    # since a weight of 0 times NaN would spoil the others.
    visible = (keys >= 0) & (keys <= queries)
    if window is not None:
        visible &= keys > queries - window
    visible |= queries < 0
    return _in_form(visible, implementation, dtype)


def slot_mask(
    slots: Tensor,
    key_len: int,
    *,
    valid: Tensor | None,
    query_heads: int,
    implementation: str,
    dtype: torch.dtype,
) -> Tensor:
    """Mask under which every query sees the keys up to its own, for some of a layer's tokens.

    Args:
        slots: ``[batch, query_len]`` int64, the queries' own slots among the keys; -1 on padding.
        key_len: Keys.
        valid: ``[batch, 1 or kv_heads, key_len]`` bool, False on padding; None where there is none.
        query_heads: Query heads.
        implementation: As in `position_mask`.
        dtype: As in `position_mask`.

    Returns:
        As `position_mask`.
    """
    visible = torch.arange(key_len, device=slots.device) <= slots[:, None, :, None]
    if valid is not None:
        if valid.shape[1] > 1:
            valid = valid.repeat_interleave(query_heads // valid.shape[1], dim=1)
        visible = visible & valid[:, :, None]
        visible = visible | (slots < 0)[:, None, :, None]  # finite, as in position_mask
    return _in_form(visible, implementation, dtype)


def causal_mask(
    key_len: int,
    query_len: int,
    *,
    implementation: str,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor | None:
    """Mask of the last ``query_len`` of ``key_len`` tokens where no slot is padding.

    Returns:
        ``[1, 1, query_len, key_len]`` as in `position_mask`; None where the implementation does
        right without.
    """
    if query_len == 1 or (key_len == query_len and implementation == "sdpa"):
        return None
    slots = torch.arange(key_len, device=device)
    visible = slots <= slots[key_len - query_len :, None]
    return _in_form(visible[None, None], implementation, dtype)


def _in_form(visible: Tensor, implementation: str, dtype: torch.dtype) -> Tensor:
    if implementation == "sdpa":
        return visible
    lowest = torch.finfo(dtype).min
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, lowest
    )
