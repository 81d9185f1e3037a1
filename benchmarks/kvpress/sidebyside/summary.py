"""What the measurements say: order of turns, agreement of kept positions, medians."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

LIBRARIES = ("kvpolicy", "kvpress")

HeadPositions = Sequence[Sequence[Sequence[int]]]
"""Positions kept, ``[layer][head]``."""


def turns_of(methods: Sequence[str], round_number: int) -> Iterator[tuple[str, str]]:
    """The turns of a round as (method, library), every pair once.

    The order moves on by one method a round and the library that goes first changes, so that a
    machine that slows down slows down all.

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
    """For every layer and head, how far two choices agree: 1 the same, 0 nothing in common.

    Twice the positions in both over the positions of one and of the other: with equal budgets, the
    share of positions that the other keeps too. Choices at random agree by the budget's rate.

    Raises:
        ValueError: The layers or heads are not as many.

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
    """Positions each layer keeps per head, rounded where heads keep unlike numbers.

    Example:
        >>> kept_counts([[[1, 2], [3, 4]], [[0, 1, 2], [3]]])
        [2, 2]
    """
    return [round(sum(map(len, layer)) / len(layer)) for layer in kept]


def share_right(generated: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> float:
    """Share of prompts after which exactly the answer was generated.

    Example:
        >>> share_right([[4, 5], [4, 6]], [[4, 5], [4, 5]])
        0.5
    """
    right = [list(got) == list(want) for got, want in zip(generated, answers, strict=True)]
    return sum(right) / len(right)


def ratio_to_full(
    rows: Sequence[Mapping[str, Any]], row: Mapping[str, Any], figure: str
) -> tuple[float, float, float]:
    """A figure over that of the same library's full cache, round by round: median and range.

    Args:
        rows: All rows of times.
        row: The row in question.
        figure: Its list of figures, one a round.

    Returns:
        Median, lowest and highest of the rounds' ratios: what disturbs a round disturbs both sides.
    """
    same = ("library", "context")
    full = next(
        each
        for each in rows
        if each["method"] == "full" and all(each[key] == row[key] for key in same)
    )
    ratios = [own / whole for own, whole in zip(row[figure], full[figure], strict=True)]
    return median(ratios), min(ratios), max(ratios)
