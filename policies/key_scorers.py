"""Scorers that look at no query: at the keys, or at nothing at all."""

from __future__ import annotations

from typing import ClassVar

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from kvpolicy.checks import check_count
from kvpolicy.context import LayerContext
from kvpolicy.interfaces import Scorer


@attrs.frozen
class KeyNormScorer(Scorer):
    """Minus the norm of each key: keys of small norm tend to draw attention.

    ``saliency[h, j] = -||k_j||_2`` per KV head ``h``, after rotary embedding, which keeps norms.

    Example:
        >>> KeyNormScorer().num_queries
        0

    Source: A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression
    (arXiv 2406.11430). Every layer is treated alike here.
    """

    paper: ClassVar[str] = "arXiv 2406.11430"

    def score(self, context: LayerContext) -> Tensor:
        """Return float32 ``[batch, kv_heads, key_len]``; see `Scorer.score`."""
        norms: Tensor = torch.linalg.vector_norm(context.keys.float(), dim=-1)
        return -norms


@attrs.frozen
class KeyDiffScorer(Scorer):
    """How little each key resembles the others: keys that stand out are kept.

    ``saliency[h, j] = -cos(k_j, m)`` with ``m`` the mean of ``k_i / ||k_i||`` over the row's tokens
    ``i``, per KV head ``h``, after rotary embedding.

    Example:
        >>> KeyDiffScorer().num_queries
        0

    Source: KeyDiff: Key Similarity-Based KV Cache Eviction (arXiv 2504.15364).
    """

    paper: ClassVar[str] = "arXiv 2504.15364"

    def score(self, context: LayerContext) -> Tensor:
        """Return float32 ``[batch, kv_heads, key_len]``; see `Scorer.score`."""
        directions = functional.normalize(context.keys.float(), dim=-1)
        real = context.valid[..., None]
        mean = (directions * real).sum(dim=2, keepdim=True) / real.sum(dim=2, keepdim=True)
        return -(directions * functional.normalize(mean, dim=-1)).sum(dim=-1)


@attrs.frozen
class RandomScorer(Scorer):
    """Random numbers: the control that every method should beat.

    A token's number depends on the seed, the layer, the KV head and its position, so that a row
    gets the same in any batch, and the same again.

    Args:
        seed: At least 0.

    Raises:
        TypeError: ``seed`` is not an int.
        ValueError: ``seed`` is below 0.

    Example:
        >>> RandomScorer(seed=3)
        RandomScorer(seed=3)
    """

    seed: int = 0

    def __attrs_post_init__(self) -> None:
        check_count("seed", self.seed, maximum=None)

    def score(self, context: LayerContext) -> Tensor:
        """Return float32 ``[batch, kv_heads, key_len]`` in [0, 1); see `Scorer.score`."""
        # Splitmix64 of the token's coordinates: the same on every device, in any batch.
        heads = torch.arange(context.kv_heads, device=context.positions.device)[:, None]
        heads = heads + context.heads.share * context.kv_heads
        state = context.positions + (heads << 40) + (context.layer_idx << 52)
        state = state + _signed((self.seed + 1) * 0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            state = (state ^ _shifted(state, shift)) * _signed(factor)
        return _shifted(state ^ _shifted(state, 31), 40).float() / (1 << 24)


def _signed(value: int) -> int:
    """The int64 of a number's lowest 64 bits."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def _shifted(state: Tensor, by: int) -> Tensor:
    """A logical shift to the right; that of int64 brings the sign along."""
    return (state >> by) & ((1 << (64 - by)) - 1)
