"""kvpress's rules as kvpolicy's parts: if nothing else differs, they keep the same positions.

Each follows the press of its name in kvpress 0.5.5.
"""

from __future__ import annotations

import attrs
from torch import Tensor
from torch.nn import functional

from kvpolicy import CachePolicy, LayerContext, Scorer
from kvpolicy.attention import causal_attention_sums
from kvpolicy.policies import (
    GQAGroupSelector,
    KeyDiff,
    LastQueryScorer,
    PassAllPropagation,
    PyramidSelector,
    StreamingLLM,
    WindowMaxPoolScorer,
)

from .reading import Settings


class WindowAveragePoolScorer(WindowMaxPoolScorer):
    """SnapKVPress: mean over the window, average-pooled, zeros beyond the ends counted."""

    def score(self, context: LayerContext) -> Tensor:
        """Return float32 ``[batch, query_heads, key_len]``."""
        before = context.key_len - self.window_size
        sums = causal_attention_sums(context)[..., :before] / self.window_size
        size = self.kernel_size
        pooled = functional.avg_pool1d(sums, size, stride=1, padding=size // 2)
        return functional.pad(pooled, (0, self.window_size))


@attrs.frozen
class MeanAttentionScorer(Scorer):
    """ObservedAttentionPress: a key's attention sum over the number of queries that see it."""

    @property
    def num_queries(self) -> None:
        """All of them."""
        return

    def score(self, context: LayerContext) -> Tensor:
        """Return float32 ``[batch, query_heads, key_len]``."""
        seen_by = context.key_len - context.positions[:, :1]
        return causal_attention_sums(context) / seen_by


class AllHeadsLastQueryScorer(LastQueryScorer):
    """TOVAPress: the last query's attention, averaged over all heads of the layer."""

    def score(self, context: LayerContext) -> Tensor:
        """Return float32 ``[batch, kv_heads, key_len]``."""
        mean = causal_attention_sums(context).mean(dim=1, keepdim=True)
        return mean.expand(-1, context.kv_heads, -1)


@attrs.frozen
class PressPyramidSelector(PyramidSelector):
    """PyramidKVPress: the window lies inside the falling budget, not beside it."""

    def count(self, seen_len: int, protected: int, layer_idx: int, num_layers: int) -> int:
        """``get_layer_budget``; see `PyramidSelector.count`."""
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


def as_kvpress(method: str, settings: Settings) -> CachePolicy:
    """The policy that keeps what a press keeps."""
    rate = settings["rate"]
    window = (settings["window_size"], settings["kernel_size"])
    if method == "streaming_llm":
        return StreamingLLM(rate, num_sinks=settings["num_sinks"])
    if method == "key_diff":
        return KeyDiff(rate, window_size=0)
    parts = {
        "snapkv": (WindowAveragePoolScorer(*window), GQAGroupSelector(rate, window[0])),
        "pyramid_kv": (WindowAveragePoolScorer(*window), PressPyramidSelector(rate, window[0])),
        "h2o": (MeanAttentionScorer(), GQAGroupSelector(rate, window_size=0)),
        "tova": (AllHeadsLastQueryScorer(), GQAGroupSelector(rate, window_size=1)),
    }
    scorer, selector = parts[method]
    return CachePolicy(scorer, selector, PassAllPropagation())
