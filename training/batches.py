"""Batch sizes, labels without a target, and positions of training rows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

TOKENS_PER_STEP = 4096
IGNORED = -100
SKIP_CHANCE = 0.75
MAX_SKIPS = 8


def skipped_positions(
    rng: random.Random, pieces: Sequence[Sequence[int]], length: int, max_position: int
) -> Tensor:
    """Return increasing positions with jumps between pieces, so that long distances are trained.

    Args:
        rng: source of the draw.
        pieces: the row's pieces; jumps happen between them.
        length: tokens in the row, at most ``max_position``.
        max_position: the positions' limit.

    Returns:
        int64 ``[length]``, strictly ascending from 0, below ``max_position``.
    """
    steps = torch.ones(length, dtype=torch.int64)
    steps[0] = 0
    if length < max_position and rng.random() < SKIP_CHANCE:
        ends = accumulate(len(piece) for piece in pieces)
        starts = [end for end in ends if end < length]
        chosen = rng.sample(starts, min(len(starts), rng.randint(1, MAX_SKIPS)))
        total = int((max_position - length) * rng.random())
        for start in chosen:
            steps[start] += rng.randint(0, 2 * total // len(chosen))
    return torch.minimum(steps.cumsum(0), max_position - length + torch.arange(length))
