"""Make lists of words in which one word occurs more often than any other."""

from __future__ import annotations

import random
from collections.abc import Sequence

FREQUENT_WEIGHTS = (6, 3, 2)
"""How often the first words come, in units that the other words come once in at most."""


def common_list(
    rng: random.Random, nouns: Sequence[str], size: int, share: float = 0.1, ratio: int = 4
) -> tuple[list[str], str]:
    """Return shuffled words, and which of them occurs ``ratio`` times as often as any other.

    Args:
        rng: source of the draws.
        nouns: words to draw from.
        size: words of the list.
        share: of the common word, as a fraction of the list; it comes three times at least.
        ratio: how often it comes for once of any other, at most.
    """
    each = max(3, int(size * share))
    rare_each = max(1, each // ratio)
    room = size - each
    common, *rare = rng.sample(nouns, 1 - (-room // rare_each))
    words = [common] * each + (rare * rare_each)[:room]
    rng.shuffle(words)
    return words, common


def frequent_list(
    rng: random.Random, nouns: Sequence[str], size: int, num_rare: int = 13
) -> tuple[list[str], str]:
    """Return shuffled words, and which of them occurs most often.

    It comes twice as often as the second, three times as often as the third and six times as often
    as any other, at least.

    Args:
        rng: source of the draws.
        nouns: words to draw from.
        size: words of the list, at least 11.
        num_rare: how many others there are beside the first three, at least.
    """
    unit = max(1, size // (sum(FREQUENT_WEIGHTS) + num_rare))
    counts = [weight * unit for weight in FREQUENT_WEIGHTS]
    room = size - sum(counts)
    chosen = rng.sample(nouns, len(counts) - (-room // unit))
    words = [word for word, count in zip(chosen, counts, strict=False) for _ in range(count)]
    words += (chosen[len(counts) :] * unit)[:room]
    rng.shuffle(words)
    return words, chosen[0]
