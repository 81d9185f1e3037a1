"""Selectors that do what kvpress 0.5.5 does; each docstring names its press.

They work for one prompt without padding in one turn, as kvpress reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from kvpolicy import LayerContext
from kvpolicy.attention import group_mean
from kvpolicy.policies import (
    AdaptiveHeadSelector,
    CriticalSelector,
    GlobalThresholdSelector,
    GQAGroupSelector,
    PyramidSelector,
)
from kvpolicy.selection import compress, ranks


@attrs.frozen
class PressPyramidSelector(PyramidSelector):
    """Selects as PyramidKVPress: the falling budget includes the window."""

    def count(self, seen_len: int, protected: int, layer_idx: int, num_layers: int) -> int:
        """Return the number of tokens by the press's rule; see `PyramidSelector.count`."""
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


class TopKSelector(GQAGroupSelector):
    """Selects as ScorerPress: by torch's topk, which orders ties arbitrarily."""

    def select(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        """Return the tokens of highest saliency of each head; see `GQAGroupSelector.select`."""
        assert saliency is not None
        scores = group_mean(saliency, context.kv_heads)
        count = self.budget.count(seen_len=context.key_len, available=context.key_len, protected=0)
        return scores.topk(count, dim=-1).indices.sort(dim=-1).values


@attrs.frozen
class PressChunkSelector(GQAGroupSelector):
    """Selects as ChunkKVPress: the rate counts all chunks, and the window scores highest."""

    chunk_length: int = attrs.field(default=20, kw_only=True)

    def select(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        """Return the tokens of the highest chunks; see `GQAGroupSelector.select`."""
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


class PressAdaptiveSelector(AdaptiveHeadSelector):
    """Selects as AdaKVPress: each head's guaranteed places include the window."""

    def _places(self, seen_len: tuple[int, ...], protected: Tensor) -> tuple[Tensor, Tensor]:
        free = self._free(seen_len[0], self.window_size)
        own = max(self.floor_count(seen_len[0]) - self.window_size, 0)
        shared = protected.shape[1] * (free - own)
        return torch.tensor([own]), torch.tensor([shared])

    def floor_count(self, seen_len: int) -> int:
        """Return the number of places guaranteed to each head, window included."""
        return max(int((self._free(seen_len, 0)) * self.floor), 1)


class PressCriticalAdaSelector(CriticalSelector):
    """Selects as CriticalAdaKVPress: the first stage keeps at least a head's guaranteed places."""

    def select(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        """Return the tokens of each head, chosen in two stages; see `CriticalSelector.select`."""
        assert saliency is not None
        assert isinstance(self.selector, PressAdaptiveSelector)
        own = self.selector.floor_count(context.key_len)
        counts = (self.selector.select(saliency, context) >= 0).sum(dim=-1)[0].tolist()
        heads = []
        for head, count in enumerate(counts):
            share = max(self.first_share, min(own / count, 1.0))
            stages = attrs.evolve(self, first_share=share)
            chosen = CriticalSelector.select(stages, saliency, context)
            heads.append(chosen[0, head][chosen[0, head] >= 0])
        width = max(counts)
        filled = [torch.cat([head.new_full((width - len(head),), -1), head]) for head in heads]
        return torch.stack(filled)[None]


class PressThresholdSelector(GlobalThresholdSelector):
    """Selects as KVzipPress: drops ``int(all * ratio)`` tokens over all layers and heads."""

    def select_together(
        self, saliencies: Sequence[Tensor], contexts: Sequence[LayerContext]
    ) -> list[Tensor]:
        """Return the tokens of each layer; see `GlobalThresholdSelector.select_together`."""
        assert self.retention_rate is not None
        scores = torch.stack(
            [
                group_mean(saliency, context.kv_heads)
                for saliency, context in zip(saliencies, contexts, strict=True)
            ],
            dim=1,
        )  # [batch, layers, kv_heads, key_len]
        scores[..., : self.protect] = scores.max() + 1
        flat = scores.flatten(1)
        count = flat.shape[1] - int(flat.shape[1] * (1 - self.retention_rate))
        places = ranks(flat[:, None], torch.ones_like(flat[:, None], dtype=torch.bool))
        chosen = (places < count).view_as(scores)
        return [
            compress(of_layer, int(of_layer.sum(dim=-1).max())) for of_layer in chosen.unbind(1)
        ]
