"""Summarise measurements: order of turns, agreement of kept positions, medians."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

LIBRARIES = ("kvpolicy", "kvpress")

HeadPositions = Sequence[Sequence[Sequence[int]]]
"""Positions kept, ``[layer][head]``."""


def turns_of(methods: Sequence[str], round_number: int) -> Iterator[tuple[str, str]]:
    """Yield a round's (method, library) pairs in the order in which they are measured.

    Each round starts with the next method and the other library, so that a machine that becomes
    slower affects all turns alike.

    Example:
        >>> list(turns_of(["a", "b"], 1))
        [('b', 'kvpress'), ('b', 'kvpolicy'), ('a', 'kvpress'), ('a', 'kvpolicy')]
    """
    start = round_number % len(methods)
    libraries = LIBRARIES[::-1] if round_number % 2 else LIBRARIES
    for method in [*methods[start:], *methods[:start]]:
        for library in libraries:
            yield method, library


def agreements(ours: HeadPositions, theirs: HeadPositions) -> list[float]:
    """Return how many positions two choices share, as a fraction, for every layer and head.

    This is twice the number of common positions over the number of positions of both. With equal
    budgets, it is the share of positions that the other keeps too. Random choices have an expected
    agreement equal to the budget's rate.

    Raises:
        ValueError: The numbers of layers or heads differ.

    Example:
        >>> agreements([[[0, 1, 2, 9], [5]]], [[[0, 1, 2, 8], [5, 6, 7]]])
        [0.75, 0.5]
    """
    shapes = [[len(layer) for layer in each] for each in (ours, theirs)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"theirs must have the heads per layer {shapes[0]}, got {shapes[1]}")
    return [
        2 * len(set(head) & set(other)) / (len(head) + len(other))
        for layer, others in zip(ours, theirs, strict=True)
        for head, other in zip(layer, others, strict=True)
    ]


def kept_counts(kept: HeadPositions) -> list[int]:
    """Return the number of positions that each layer keeps per head (the mean over heads).

    Example:
        >>> kept_counts([[[1, 2], [3, 4]], [[0, 1, 2], [3]]])
        [2, 2]
    """
    return [round(sum(map(len, layer)) / len(layer)) for layer in kept]


def share_right(generated: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> float:
    """Return the fraction of prompts answered exactly.

    Example:
        >>> share_right([[4, 5], [4, 6]], [[4, 5], [4, 5]])
        0.5
    """
    right = [list(got) == list(want) for got, want in zip(generated, answers, strict=True)]
    return sum(right) / len(right)


def ratio_to_full(
    rows: Sequence[Mapping[str, Any]], row: Mapping[str, Any], figure: str
) -> tuple[float, float, float]:
    """Return a value over the library's value for a full cache: median and range over rounds.

    Args:
        rows: All rows of times.
        row: The row in question.
        figure: Its list of figures, one a round.

    Returns:
        Median, lowest and highest of the rounds' ratios; a disturbance of a round affects both
        sides of its ratio.
    """
    same = ("library", "context")
    full = next(
        each
        for each in rows
        if each["method"] == "full" and all(each[key] == row[key] for key in same)
    )
    ratios = [own / whole for own, whole in zip(row[figure], full[figure], strict=True)]
    return median(ratios), min(ratios), max(ratios)
