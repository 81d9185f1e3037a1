"""Turns saliency into the indices of kept tokens, under a budget."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpolicy.budgets import Budget
from kvpolicy.host_counts import on_device

__all__ = ["compress", "head_budgets", "row_budgets", "select_top"]


def head_budgets(
    budget: Budget, seen_len: tuple[int, ...], *, valid: Tensor, protected: Tensor
) -> list[list[int]]:
    """Return how many tokens each head keeps under a budget, computed from the layer's tensors.

    Reading the tensors waits for the device; `counts_under` counts without reading them.

    Args:
        budget: The budget.
        seen_len: Tokens of each row's context so far.
        valid: bool ``[batch, heads, length]``, the tokens to choose from.
        protected: bool ``[batch, heads, length]``, the tokens kept whatever the budget.

    Returns:
        For each row and head, the number of tokens to choose. It is the same for all heads of a row
        that hold equally many tokens and equally many protected ones.
    """
    available, fixed = torch.stack([valid.sum(dim=-1), protected.sum(dim=-1)]).tolist()
    budgets = []
    for seen, *heads in zip(seen_len, available, fixed, strict=True):
        row = zip(*heads, strict=True)
        budgets.append([budget.count(seen_len=seen, available=a, protected=p) for a, p in row])
    return budgets


def row_budgets(
    budget: Budget, seen_len: tuple[int, ...], *, valid: Tensor, protected: Tensor
) -> list[int]:
    """Return how many tokens each batch row keeps under a budget: the smallest count of any head.

    Args:
        budget: See `head_budgets`.
        seen_len: See `head_budgets`.
        valid: See `head_budgets`.
        protected: See `head_budgets`.
    """
    heads = head_budgets(budget, seen_len, valid=valid, protected=protected)
    return [min(each) for each in heads]


def ranks(saliency: Tensor, candidates: Tensor) -> Tensor:
    """Rank the candidate tokens of each row by saliency, 0 for the highest, and then the others.

    Among equals the earlier comes first. NaN counts as lowest. All are ``[..., length]``.

    Example:
        >>> ranks(torch.tensor([0.1, 0.9, 0.9]), torch.tensor([True, True, True]))
        tensor([2, 0, 1])
    """
    lowest = torch.finfo(saliency.dtype).min
    scores = saliency.nan_to_num(nan=lowest, neginf=lowest).masked_fill(~candidates, -torch.inf)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    slots = torch.arange(saliency.shape[-1], device=saliency.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, slots)


def select_top(
    saliency: Tensor,
    budgets: Sequence[int] | Sequence[Sequence[int]],
    *,
    valid: Tensor,
    protected: Tensor,
) -> Tensor:
    """Return indices of the protected and the most salient other tokens, up to each row's budget.

    Protection is a set, not a score: the protected take their places first, whatever their
    saliency. Among equals the earlier token wins, so that a larger budget only adds tokens. NaN
    counts as lowest.

    Args:
        saliency: float ``[batch, heads, length]``, larger means keep.
        budgets: For each row, or for each row and head, how many tokens to choose; at least the
            protected tokens and at most the valid ones.
        valid: bool ``[batch, heads, length]``, False on padding.
        protected: bool ``[batch, heads, length]``, among the valid.

    Returns:
        int64 ``[batch, heads, max(budgets)]``, ascending, filled with -1 on the left where the
        budget is smaller.

    Example:
        >>> saliency = torch.tensor([[[0.1, 0.9, 0.5, 0.9, 0.0]]])
        >>> valid = torch.ones(1, 1, 5, dtype=torch.bool)
        >>> protected = torch.tensor([[[False, False, False, False, True]]])
        >>> select_top(saliency, [2], valid=valid, protected=protected)
        tensor([[[1, 4]]])
    """
    candidates = valid & ~protected
    rows = [[each] if isinstance(each, int) else each for each in budgets]
    most, fewest = max(map(max, rows)), min(map(min, rows))
    budget: int | Tensor = most
    if fewest < most:
        budget = on_device(rows, saliency.device)[..., None]  # [batch, 1 or heads, 1]
    free = budget - protected.sum(dim=-1, keepdim=True)
    chosen = protected | (candidates & (ranks(saliency, candidates) < free))
    return compress(chosen, most)


def select_between(saliency: Tensor, count: int, *, first: int = 0, tail: int = 0) -> Tensor:
    """Choose the first tokens, the last ones and the most salient others of unpadded rows.

    Chooses what `select_top` chooses if these are the protected tokens and all others are valid,
    with fewer operations. The ``count`` of every head is at least ``first + tail``.

    Example:
        >>> select_between(torch.tensor([[[0.1, 0.9, 0.5, 0.9, 0.0]]]), 2, tail=1)
        tensor([[[1, 4]]])
    """
    lowest, length = torch.finfo(saliency.dtype).min, saliency.shape[-1]
    scores = saliency.nan_to_num(nan=lowest, neginf=lowest)  # and the highest number for inf
    for start, protected in ((0, first), (length - tail, tail)):
        if protected:
            scores.narrow(-1, start, protected).fill_(torch.inf)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return order[..., :count].sort(dim=-1).values


def highest(saliency: Tensor, candidates: Tensor, counts: Sequence[int]) -> Tensor:
    """Mark as many candidates of every row ``[length]`` as ``counts`` says, the most salient ones.

    Marks the same entries as ``ranks(...) < counts``, but faster for the rows of all layers.

    Example:
        >>> highest(torch.tensor([[0.1, 0.9, 0.9]]), torch.tensor([[True, True, True]]), [1])
        tensor([[False,  True, False]])
    """
    lowest = torch.finfo(saliency.dtype).min
    scores = saliency.nan_to_num(nan=lowest, neginf=lowest).masked_fill(~candidates, -torch.inf)
    taken = torch.zeros_like(candidates)
    for row, count in enumerate(counts):
        if not count:
            continue
        own = scores[row]
        threshold = own.kthvalue(len(own) - count + 1).values
        above, equal = own > threshold, own == threshold
        places = count - above.sum()
        taken[row] = above | (equal & (equal.cumsum(dim=0, dtype=torch.int32) <= places))
    return taken


def compress(chosen: Tensor, length: int) -> Tensor:
    """Return the indices of a mask's True entries, ascending, left-padded to ``length`` with -1.

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


def gather_slots(tensor: Tensor, indices: Tensor, *, padded: bool = True) -> Tensor:
    """Copy the keys or values at indices ``[batch, heads or 1, count]``; -1, if padded, gives 0."""
    slots = indices.clamp(min=0) if padded else indices
    index = slots[..., None].expand(-1, tensor.shape[1], -1, tensor.shape[-1])
    gathered = tensor.gather(2, index)
    return gathered.masked_fill_((indices < 0)[..., None], 0) if padded else gathered


def gather_positions(positions: Tensor, indices: Tensor, *, padded: bool = True) -> Tensor:
    """Gather entries of a tensor's last axis by index; index -1, if padded, gives -1."""
    if not padded:
        return positions.gather(-1, indices)
    return positions.gather(-1, indices.clamp(min=0)).masked_fill_(indices < 0, -1)
