"""Chooses tokens on plain Python lists: budgets, pooling, saliency and selection."""

import math
from collections.abc import Collection, Sequence


def budget(
    rate: float | None, tokens: int | None, *, seen: int, available: int, protected: int
) -> int:
    """Turns a rate or a number of tokens into the number of tokens to keep.

    `min(available, max(int(seen * rate), protected, 1))`, or with `tokens` in place of the product:
    at least one, so that no context is ever emptied.
    """
    if tokens is None:
        assert rate is not None, "a budget is a rate or a number of tokens"
        tokens = int(seen * rate)
    return min(available, max(tokens, protected, 1))


def max_pool(row: Sequence[float], kernel_size: int) -> list[float]:
    """Max-pools values over `kernel_size // 2` neighbours on each side."""
    assert kernel_size % 2 == 1, "kernel_size must be odd"
    reach = kernel_size // 2
    return [max(row[max(0, i - reach) : i + reach + 1]) for i in range(len(row))]


def max_pool_peak_first(row: Sequence[float], kernel_size: int) -> list[float]:
    """Max-pools values over neighbours, whose shares fall by 1 / 2048 in the order of their ranks.

    The ranks begin with the value itself; then come the neighbours after it, from near to far, then
    those before it.
    """
    assert kernel_size % 2 == 1, "kernel_size must be odd"
    reach = kernel_size // 2
    ranked = [0, *range(1, reach + 1), *range(-1, -reach - 1, -1)]
    pooled = list(row)
    for peak, value in enumerate(row):
        for rank, offset in enumerate(ranked):
            if 0 <= peak + offset < len(row):
                pooled[peak + offset] = max(pooled[peak + offset], value * (1 - rank / 2048))
    return pooled


def average_pool(row: Sequence[float], kernel_size: int) -> list[float]:
    """Average-pools values over `kernel_size // 2` neighbours on each side; missing ones are 0."""
    assert kernel_size % 2 == 1, "kernel_size must be odd"
    reach = kernel_size // 2
    return [
        math.fsum(row[max(0, i - reach) : i + reach + 1]) / kernel_size for i in range(len(row))
    ]


def highest(scores: Sequence[float], count: int) -> list[int]:
    """Returns the indices of the `count` highest scores, ascending; ties take the earlier one."""
    by_score = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    return sorted(by_score[:count])


def below(positions: Sequence[int], first: int) -> list[int]:
    """Returns the indices of the positions below `first`, which `protect` keeps."""
    return [index for index, position in enumerate(positions) if position < first]


def window_and_highest(
    scores: Sequence[float], length: int, count: int, exempt: Collection[int] = ()
) -> list[int]:
    """Returns the indices of the window, the exempt entries and the highest others."""
    window = list(range(len(scores), length))
    free = count - len(window) - len(exempt)
    assert free >= 0, "the window and the exempt are always kept"
    others = [index for index in range(len(scores)) if index not in exempt]
    chosen = [others[place] for place in highest([scores[index] for index in others], free)]
    return sorted([*exempt, *chosen]) + window


def sinks_and_recent(positions: Sequence[int], num_sinks: int, count: int) -> list[int]:
    """Returns the indices of the sinks, below `num_sinks`, and of the most recent entries."""
    sinks = [index for index, position in enumerate(positions) if position < num_sinks]
    assert count >= len(sinks), "sinks are always kept"
    others = list(range(len(sinks), len(positions)))
    recent = list(reversed(others))[: count - len(sinks)]
    return sinks + sorted(recent)


def margin(
    scores: Sequence[float],
    chosen: Collection[int],
    exempt: Collection[int] = (),
    *,
    scale: float | None = None,
) -> float:
    """Returns the smallest relative gap between the scores of a kept and a dropped entry.

    This is the minimum of `(kept - dropped) / kept` over all kept and dropped tokens of different
    score; a small one means that rounding may change the choice. Equal scores do not count, since
    pooling makes neighbours equal in every implementation.
    `scale` divides the gap instead of the kept score, for scores of any sign. Indices in `chosen`
    beyond `scores` (the window) are ignored.
    """
    competed = [index for index in range(len(scores)) if index not in exempt]
    kept = [scores[index] for index in competed if index in chosen]
    dropped = [scores[index] for index in competed if index not in chosen]
    return min(
        ((k - d) / (k if scale is None else scale) for k in kept for d in dropped if k > d),
        default=math.inf,
    )


def head_mean(rows: Sequence[Sequence[float]]) -> list[float]:
    """Averages rows of equal length over heads, column by column."""
    return [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)]
