"""How often the words of a list come, so that some of them stand out."""

from __future__ import annotations

import random
from collections.abc import Sequence

FREQUENT_WEIGHTS = (6, 4, 3)
"""How often the frequent words come, in units that the other words come once in at most."""


def common_list(
    rng: random.Random, nouns: Sequence[str], size: int, num_common: int = 4, ratio: int = 5
) -> tuple[list[str], list[str]]:
    """Return ``size`` words in random order, and the few that come ``ratio`` times as often.

    Args:
        rng: source of the draws.
        nouns: words to draw from.
        size: words of the list; the common ones take about a quarter of it.
        num_common: how many words are common.
        ratio: how often they come for once of any other.

    Returns:
        The list, and its common words.
    """
    each = max(3, size // (4 * num_common))
    rare_each = max(1, each // ratio)
    room = size - each * num_common
    num_rare = -(-room // rare_each)
    chosen = rng.sample(nouns, num_common + num_rare)
    common, rare = chosen[:num_common], chosen[num_common:]
    words = common * each + (rare * rare_each)[:room]
    rng.shuffle(words)
    return words, common


def frequent_list(
    rng: random.Random, nouns: Sequence[str], size: int, num_rare: int
) -> tuple[list[str], list[str]]:
    """Return ``size`` words in random order, and the three that come most often.

    The three come six, four and three times as often as any other may come at most.

    Args:
        rng: source of the draws.
        nouns: words to draw from.
        size: words of the list.
        num_rare: how many other words there are at least.
    """
    unit = max(1, size // (sum(FREQUENT_WEIGHTS) + num_rare))
    counts = [weight * unit for weight in FREQUENT_WEIGHTS]
    room = size - sum(counts)
    chosen = rng.sample(nouns, len(counts) + max(-(-room // unit), 0))
    frequent, rare = chosen[: len(counts)], chosen[len(counts) :]
    words = [word for word, count in zip(frequent, counts, strict=True) for _ in range(count)]
    words += (rare * unit)[:room]
    rng.shuffle(words)
    return words[:size], frequent
