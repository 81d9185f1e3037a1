"""Scores tokens at random: the control in comparisons."""

import attrs
import torch
from torch import Tensor

from kvpolicy.checks import check_count
from kvpolicy.context import LayerContext
from kvpolicy.interfaces import Scorer


@attrs.frozen
class RandomScorer(Scorer):
    """Scores tokens by random numbers: the control that every method should beat.

    A token's number depends on the seed, the layer, the KV head and its position, so that a row
    gets the same numbers in every batch and every run.

    Args:
        seed: Seed of the random numbers, at least 0.

    Raises:
        TypeError: ``seed`` is not an int.
        ValueError: ``seed`` is below 0.

    Example:
        >>> RandomScorer(seed=3)
        RandomScorer(seed=3)
    """

    seed: int = attrs.field(default=0, kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_count("seed", self.seed, maximum=None)

    def score(self, context: LayerContext) -> Tensor:
        """Return the saliency ``[batch, kv_heads, key_len]`` in [0, 1); see `Scorer.score`."""
        # Splitmix64 of the token's coordinates: the same on every device, in any batch.
        heads = torch.arange(context.kv_heads, device=context.positions.device)[:, None]
        heads = heads + context.layer.heads.share * context.kv_heads
        state = context.positions + (heads << 40) + (context.layer_idx << 52)
        state = state + _signed((self.seed + 1) * 0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            state = (state ^ _shifted(state, shift)) * _signed(factor)
        return _shifted(state ^ _shifted(state, 31), 40).float() / (1 << 24)


def _signed(value: int) -> int:
    """Reinterpret an int's lowest 64 bits as a signed int64."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def _shifted(state: Tensor, by: int) -> Tensor:
    """Shift the bits of an int64 tensor to the right; zeros come in, not the sign bit."""
    return (state >> by) & ((1 << (64 - by)) - 1)
