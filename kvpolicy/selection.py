"""Choosing the best tokens under a budget: the one place where saliency becomes indices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpolicy.budgets import Budget


def row_budgets(
    budget: Budget, seen_len: tuple[int, ...], *, valid: Tensor, protected: Tensor
) -> list[int]:
    """Each row's number of tokens under a budget.

    Args:
        budget: The budget.
        seen_len: Tokens of each row's context so far.
        valid: bool ``[batch, heads, length]``, the tokens there are to choose from.
        protected: bool ``[batch, heads, length]``, those that are kept whatever the budget.

    Returns:
        For each row, the number of tokens to choose in each of its heads: what the head with the
        fewest has.
    """
    counts = torch.stack([valid.sum(dim=-1).amin(dim=-1), protected.sum(dim=-1).amax(dim=-1)])
    return [
        budget.count(seen_len=seen, available=available, protected=fixed)
        for seen, available, fixed in zip(seen_len, *counts.tolist(), strict=True)
    ]


def select_top(
    saliency: Tensor, budgets: Sequence[int], *, valid: Tensor, protected: Tensor
) -> Tensor:
    """Indices of the protected tokens and the most salient others, up to each row's budget.

    Protection is a set, not a score: the protected take their places first, whatever their
    saliency. Among equals the earlier token wins, so that a larger budget only adds tokens. NaN
    counts as lowest.

    Args:
        saliency: float ``[batch, heads, length]``, larger means keep.
        budgets: For each row, how many tokens to choose; from the protected tokens' number to the
            valid tokens'.
        valid: bool ``[batch, heads, length]``, False on padding.
        protected: bool ``[batch, heads, length]``, among the valid.

    Returns:
        int64 ``[batch, heads, max(budgets)]``, ascending, filled with -1 on the left in rows with
        a smaller budget.

    Example:
        >>> saliency = torch.tensor([[[0.1, 0.9, 0.5, 0.9, 0.0]]])
        >>> valid = torch.ones(1, 1, 5, dtype=torch.bool)
        >>> protected = torch.tensor([[[False, False, False, False, True]]])
        >>> select_top(saliency, [2], valid=valid, protected=protected)
        tensor([[[1, 4]]])
    """
    candidates = valid & ~protected
    lowest = torch.finfo(saliency.dtype).min
    scores = saliency.nan_to_num(nan=lowest, neginf=lowest).masked_fill(~candidates, -torch.inf)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    slots = torch.arange(saliency.shape[-1], device=saliency.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(-1, order, slots)
    budget = torch.tensor(list(budgets), device=saliency.device)[:, None, None]
    free = budget - protected.sum(dim=-1, keepdim=True)
    chosen = protected | (candidates & (rank < free))
    return compress(chosen, max(budgets))


def compress(chosen: Tensor, length: int) -> Tensor:
    """Indices where ``chosen`` is True, ascending, as the last of ``length`` slots.

    Args:
        chosen: bool ``[..., size]`` with at most ``length`` True in every row.
        length: Slots of the result.

    Returns:
        int64 ``[..., length]``, filled with -1 on the left.

    Example:
        >>> compress(torch.tensor([[True, False, True], [False, True, False]]), 2)
        tensor([[ 0,  2],
                [-1,  1]])
    """
    slots = torch.arange(chosen.shape[-1], device=chosen.device)
    indices = torch.where(chosen, slots, -1).sort(dim=-1).values
    return indices[..., chosen.shape[-1] - length :]


def gather_slots(tensor: Tensor, indices: Tensor) -> Tensor:
    """Take slots of keys or values; index -1 gives a slot of zeros.

    Args:
        tensor: ``[batch, heads, length, head_dim]``.
        indices: int64 ``[batch, heads, count]``.

    Returns:
        ``[batch, heads, count, head_dim]``, a copy of its own.
    """
    index = indices.clamp(min=0)[..., None].expand(-1, -1, -1, tensor.shape[-1])
    return tensor.gather(2, index).masked_fill_((indices < 0)[..., None], 0)


def gather_positions(positions: Tensor, indices: Tensor) -> Tensor:
    """Take entries of the last axis; index -1 gives -1.

    Args:
        positions: int64 ``[..., length]``.
        indices: int64 ``[..., count]``.

    Returns:
        int64 ``[..., count]``.
    """
    return positions.gather(-1, indices.clamp(min=0)).masked_fill_(indices < 0, -1)
