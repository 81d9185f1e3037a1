"""Parts that choose as kvpress 0.5.5 does, for methods whose rules differ from kvpolicy's.

Each docstring names the press. They work for one prompt without padding in one turn.
"""

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from kvpolicy import LayerContext, Scorer
from kvpolicy.attention import causal_attention_sums, group_mean
from kvpolicy.policies import (
    AdaptiveHeadSelector,
    GlobalThresholdSelector,
    GQAGroupSelector,
    LagKVScorer,
    LastQueryScorer,
    PyramidSelector,
)
from kvpolicy.selection import compress, ranks


@attrs.frozen
class MeanAttentionScorer(Scorer):
    """Scores as ObservedAttentionPress: a key's mean attention over the queries that see it."""

    @property
    def num_queries(self) -> None:
        return

    def score(self, context: LayerContext) -> Tensor:
        return causal_attention_sums(context) / (context.key_len - context.positions[:, :1])


class AllHeadsLastQueryScorer(LastQueryScorer):
    """Scores as TOVAPress: the last query's attention, averaged over all heads of a layer."""

    def score(self, context: LayerContext) -> Tensor:
        mean = causal_attention_sums(context).mean(dim=1, keepdim=True)
        return mean.expand(-1, context.kv_heads, -1)


class TiedLagScorer(LagKVScorer):
    """Scores as LagKVPress: sinks, the last run and all tokens after it score 1."""

    def score(self, context: LayerContext) -> Tensor:
        return super().score(context).clamp(max=1.0)


class TopKSelector(GQAGroupSelector):
    """Selects as ScorerPress: by torch's topk, which orders ties arbitrarily."""

    def select(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        assert saliency is not None
        scores = group_mean(saliency, context.kv_heads)
        count = self.budget.count(seen_len=context.key_len, available=context.key_len, protected=0)
        return scores.topk(count, dim=-1).indices.sort(dim=-1).values


@attrs.frozen
class PressPyramidSelector(PyramidSelector):
    """Selects as PyramidKVPress: the falling budget includes the window."""

    def count(self, seen_len: int, protected: int, layer_idx: int, num_layers: int) -> int:
        assert self.retention_rate is not None
        budget = seen_len * self.retention_rate
        least = budget / self.beta
        most = budget * 2 - least
        if most >= seen_len - self.window_size:
            most = seen_len - self.window_size
            least = budget * 2 - most
        if not seen_len >= most >= least >= self.window_size:
            return max(1, round(budget))
        return round(most - layer_idx * (most - least) / (num_layers - 1))


class PressAdaptiveSelector(AdaptiveHeadSelector):
    """Selects as AdaKVPress: each head's guaranteed places include the window."""

    def _protects_by_slot(self, context: LayerContext) -> bool:
        return False  # else a shorter way is taken, which does not ask `_places`

    def _places(self, seen_len: tuple[int, ...], protected: Tensor) -> tuple[Tensor, Tensor]:
        guaranteed = max(int(self._free(seen_len[0], 0) * self.floor), 1)
        own = max(guaranteed - self.window_size, 0)
        shared = protected.shape[1] * (self._free(seen_len[0], self.window_size) - own)
        return torch.tensor([own]), torch.tensor([shared])


@attrs.frozen
class PressChunkSelector(GQAGroupSelector):
    """Selects as ChunkKVPress: the rate counts all chunks, and the window scores highest."""

    chunk_length: int = attrs.field(default=20, kw_only=True)

    def select(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        assert saliency is not None
        assert self.retention_rate is not None
        scores = group_mean(saliency, context.kv_heads)
        scores[..., -self.window_size :] = scores.max() + 1
        chunks = scores.sum(dim=1).split(self.chunk_length, dim=-1)
        means = torch.stack([chunk.mean(dim=-1) for chunk in chunks], dim=-1)
        ratio = 1 - self.retention_rate  # in its own arithmetic, which rounds
        best = means.topk(max(1, int(len(chunks) * (1 - ratio))), dim=-1).indices
        chosen = torch.isin(torch.arange(context.key_len) // self.chunk_length, best[0])
        return chosen.nonzero()[:, 0].expand(1, context.kv_heads, -1)


class PressThresholdSelector(GlobalThresholdSelector):
    """Selects as KVzipPress: drops ``int(all * ratio)`` tokens over all layers and heads."""

    def select_together(
        self, saliencies: Sequence[Tensor], contexts: Sequence[LayerContext]
    ) -> list[Tensor]:
        assert self.retention_rate is not None
        pairs = zip(saliencies, contexts, strict=True)
        scores = torch.stack([group_mean(each, at.kv_heads) for each, at in pairs], dim=1)
        scores[..., : self.protect] = scores.max() + 1  # [batch, layers, kv_heads, key_len]
        flat = scores.flatten(1)
        count = flat.shape[1] - int(flat.shape[1] * (1 - self.retention_rate))
        places = ranks(flat[:, None], torch.ones_like(flat[:, None], dtype=torch.bool))
        chosen = (places < count).view_as(scores)
        return [compress(layer, int(layer.sum(dim=-1).max())) for layer in chosen.unbind(1)]
