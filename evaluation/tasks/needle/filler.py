"""Draw filler text of the needle language, at random places around other segments."""

import random
from collections.abc import Sequence
from itertools import pairwise

from .vocabulary import FILLERS


def gaps(rng: random.Random, fillers: int, count: int) -> list[int]:
    """Divide ``fillers`` filler tokens randomly over the gaps around and between segments.

    All ways to divide them are equally likely.

    Example:
        >>> sum(gaps(random.Random(0), 7, 3)), len(gaps(random.Random(0), 7, 3))
        (7, 4)
    """
    slots = fillers + count
    cuts = [-1, *sorted(rng.sample(range(slots), count)), slots]
    return [right - left - 1 for left, right in pairwise(cuts)]


def scattered(rng: random.Random, segments: Sequence[list[int]], fillers: int) -> list[list[int]]:
    """Return segments of tokens with filler tokens put before, between and after them.

    Args:
        rng: source of the draws.
        segments: token ids that stay together, in their order.
        fillers: filler tokens to draw.

    Returns:
        Filler and segments in turns: filler first and last, possibly empty.
    """
    first, *others = gaps(rng, fillers, len(segments))
    pieces = [rng.choices(FILLERS, k=first)]
    for segment, gap in zip(segments, others, strict=True):
        pieces += [segment, rng.choices(FILLERS, k=gap)]
    return pieces
