"""Scorers that do what kvpress 0.5.5 does; each docstring names its press.

They work for one prompt without padding in one turn, as kvpress reads.
"""

from __future__ import annotations

from typing import ClassVar

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from kvpolicy import LayerContext, Scorer
from kvpolicy.attention import causal_attention_sums, group_mean
from kvpolicy.policies import (
    ChunkAttentionScorer,
    LagKVScorer,
    LastQueryScorer,
    LeverageScorer,
)


@attrs.frozen
class MeanAttentionScorer(Scorer):
    """Scores as ObservedAttentionPress: a key's mean attention over the queries that see it."""

    @property
    def num_queries(self) -> None:
        """Always None: the scorer reads all queries."""
        return

    def score(self, context: LayerContext) -> Tensor:
        """Return the saliency, float32 ``[batch, query_heads, key_len]``."""
        seen_by = context.key_len - context.positions[:, :1]
        return causal_attention_sums(context) / seen_by


class AllHeadsLastQueryScorer(LastQueryScorer):
    """Scores as TOVAPress: the last query's attention, averaged over all heads of a layer."""

    def score(self, context: LayerContext) -> Tensor:
        """Return the saliency, float32 ``[batch, kv_heads, key_len]``."""
        mean = causal_attention_sums(context).mean(dim=1, keepdim=True)
        return mean.expand(-1, context.kv_heads, -1)


class TiedLagScorer(LagKVScorer):
    """Scores as LagKVPress: sinks, the last run and all tokens after it score 1."""

    def score(self, context: LayerContext) -> Tensor:
        """Return the saliency, float32 ``[batch, kv_heads, key_len]``."""
        return super().score(context).clamp(max=1.0)


class DrawnLeverageScorer(LeverageScorer):
    """Scores as LeverageScorePress: one random projection per head, drawn layer after layer."""

    draws_from: ClassVar[int] = 0
    """The seed that kvpress's worker sets before it reads."""

    def score(self, context: LayerContext) -> Tensor:
        """Return the saliency ``[batch, kv_heads, key_len]``, standardized over all heads."""
        assert context.layer.rotary is not None
        inner = slice(self.num_sinks, context.key_len - self.window_size)
        keys = context.layer.rotary.turned_back(context.keys, context.positions)[:, :, inner]
        shape = (context.batch, context.kv_heads, keys.shape[3], self.sketch_size)
        generator = torch.Generator().manual_seed(self.draws_from)
        for _ in range(context.layer_idx + 1):
            drawn = torch.randn(shape, generator=generator)
        sketched = (keys - keys.mean(dim=2, keepdim=True)) @ (drawn / self.sketch_size**0.5)
        products = sketched.transpose(2, 3) @ sketched + 0.01 * torch.eye(self.sketch_size)
        solved = torch.linalg.solve(products, sketched.transpose(2, 3))
        leverage = (sketched * solved.transpose(2, 3)).sum(dim=-1).clamp(min=0)
        return functional.pad(over_all(leverage), (self.num_sinks, self.window_size))


class ZeroPaddedChunkScorer(ChunkAttentionScorer):
    """Scores as NonCausalAttnPress: zeros that fill up the last chunk take part in attention.

    The press means to mask these zeros, but adds -1e-9 to their scores, which masks nothing.
    """

    def score(self, context: LayerContext) -> Tensor:
        """Return the saliency ``[batch, kv_heads, key_len]``, standardized over all heads."""
        inner = slice(self.num_sinks, context.key_len - self.window_size)
        group = context.query_heads // context.kv_heads
        keys = context.keys[:, :, inner].repeat_interleave(group, dim=1)
        length = keys.shape[2]
        queries, keys = (
            functional.pad(states, (0, 0, 0, -length % self.chunk_size)).unflatten(
                2, (-1, self.chunk_size)
            )
            for states in (context.queries[:, :, inner], keys)
        )
        attention = (queries @ keys.transpose(-1, -2)).softmax(dim=-1).sum(dim=-2)
        received = group_mean(attention.flatten(2)[..., :length], context.kv_heads)
        weighed = received * context.values[:, :, inner].norm(dim=-1)
        pooled = functional.avg_pool1d(
            weighed, self.kernel_size, stride=1, padding=self.kernel_size // 2
        )
        return functional.pad(over_all(pooled), (self.num_sinks, self.window_size))


def over_all(scores: Tensor) -> Tensor:
    """Standardize scores to mean 0 and deviation 1 over all heads together."""
    return (scores - scores.mean()) / scores.std()
