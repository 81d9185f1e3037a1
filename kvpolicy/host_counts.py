"""Counts tokens on the host, without reading a tensor.

When the processor reads a number from a tensor on a GPU, it waits until the GPU has finished all
earlier work, and cannot queue more work meanwhile. The number of tokens that a layer sees, and the
number that a budget leaves, are mostly known to the processor without such a read.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from kvpolicy.budgets import Budget
from kvpolicy.context import LayerContext
from kvpolicy.declarations import still_holds
from kvpolicy.interfaces import KVSelector

__all__ = ["counts_under", "held_counts", "known_counts", "on_device", "protected_counts"]


def known_counts(selector: KVSelector, context: LayerContext) -> tuple[int, ...] | None:
    """Return how many tokens per row a selector keeps; None if that is unknown before it selects.

    None where the number is not known, and where a class overrides `select` or `protected` but not
    `kept_counts`: the inherited counts may then be wrong.
    """
    if context._held_len is None:
        return None
    known = context._counts  # both a selector's caller and the selector itself ask
    if id(selector) not in known:
        holds = still_holds(selector, "kept_counts", "select", "protected")
        known[id(selector)] = selector.kept_counts(context) if holds else None
    return known[id(selector)]


def held_counts(context: LayerContext) -> tuple[int, ...] | None:
    """Return how many tokens each head of a layer holds per row, if lengths alone tell; else None.

    The new tokens count. None also where the heads of a row hold different numbers of tokens.

    Args:
        context: The layer.
    """
    return context._held_len


def protected_counts(
    context: LayerContext, *, tail: int, first: int
) -> tuple[tuple[int, int], ...] | None:
    """Return the smallest and largest number of protected tokens of any head, per batch row.

    Args:
        context: The layer.
        tail: Trailing tokens that are protected.
        first: First tokens of the row's context that are protected; a later turn may hold fewer.

    Returns:
        None where the lengths of rows are not known.
    """
    if context._held_len is None:
        return None
    return tuple(
        (min(held, tail + first if held == seen else tail), min(held, tail + first))
        for held, seen in zip(context._held_len, context.seen_len, strict=True)
    )


def counts_under(
    budget: Budget, context: LayerContext, protected: Sequence[tuple[int, int]] | None
) -> tuple[int, ...] | None:
    """Return how many tokens each head keeps per batch row under a budget, from lengths alone.

    Args:
        budget: The budget.
        context: The layer.
        protected: See `protected_counts`.

    Returns:
        For each row, the number of tokens; None where it depends on unknown lengths.
    """
    if context._held_len is None or protected is None:
        return None
    return _counts(budget, context.seen_len, context._held_len, tuple(protected))


@functools.lru_cache(maxsize=256)  # layers mostly see the same lengths
def _counts(
    budget: Budget,
    seen_len: tuple[int, ...],
    held_len: tuple[int, ...],
    protected: tuple[tuple[int, int], ...],
) -> tuple[int, ...] | None:
    rows = zip(seen_len, held_len, protected, strict=True)
    counts = [
        {budget.count(seen_len=seen, available=held, protected=fixed) for fixed in bounds}
        for seen, held, bounds in rows
    ]
    return None if any(len(each) > 1 for each in counts) else tuple(min(each) for each in counts)


def on_device(numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Copy Python ints to an int64 tensor on a device without waiting for the device."""
    # What is not pinned is copied aside at once, so that nothing has to stay for the device; but
    # not so with MPS, which reads the numbers later.
    return torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=device.type != "mps")
