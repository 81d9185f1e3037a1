"""The methods, which choose at each layer the entries to keep and the tokens to pass on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol

from torch import Tensor

from .attention import Entry, attention_probabilities
from .selection import (
    below,
    budget,
    head_mean,
    margin,
    max_pool,
    max_pool_peak_first,
    sinks_and_recent,
    window_and_highest,
)


@dataclass(frozen=True)
class LayerView:
    """The data of one layer on which a method bases its choice.

    Attributes:
        layer_idx: which decoder layer.
        num_layers: decoder layers in the model.
        queries: per query head `[query_len, head_dim]`, of the new tokens that reached the layer.
        new_positions: positions of those tokens, ascending.
        entries: per KV head the entries kept before and then those of the new tokens.
        seen: tokens of the row so far, including the new ones and the dropped ones.
        scaling: factor on the products of queries and keys.
        rope_theta: base of the frequencies by which queries and keys were turned.
        rope_channels: which of a head's channels were turned.
        notes: what the method has noted of the layers before in the same prefill, by layer.
        output_weight: `[hidden, query_heads * value_dim]`, of the layer's output projection.
    """

    layer_idx: int
    num_layers: int
    queries: Sequence[Tensor]
    new_positions: Sequence[int]
    entries: Sequence[Sequence[Entry]]
    seen: int
    scaling: float
    rope_theta: float | None = None
    output_weight: Tensor | None = None
    rope_channels: slice = field(default_factory=lambda: slice(None))
    notes: dict[int, Any] = field(default_factory=dict)


def window_attention(layer: LayerView, window_size: int) -> list[list[float]]:
    """Returns, per query head, the last queries' summed attention to the keys before the window."""
    group = len(layer.queries) // len(layer.entries)
    found = []
    for head, queries in enumerate(layer.queries):
        held = layer.entries[head // group]
        given = attention_probabilities(
            queries[-window_size:], layer.new_positions[-window_size:], held, layer.scaling
        )
        before = max(0, len(held) - window_size)
        found.append([math.fsum(given[:, key].tolist()) for key in range(before)])
    return found


@dataclass(frozen=True)
class Choice:
    """A method's decision at one layer.

    Attributes:
        kept: per KV head, ascending indices into its entries.
        passed: ascending indices into the new tokens, or None for all of them.
        margin: the smallest relative gap of any choice made here; see `selection.margin`.
    """

    kept: list[list[int]]
    passed: list[int] | None = None
    margin: float = field(default=inf)


class Method(Protocol):
    """Base of methods, which choose at every layer of a prefill."""

    def choose(self, layer: LayerView) -> Choice:
        """Chooses the entries that a layer keeps, and the new tokens that are passed on."""


@dataclass(frozen=True)
class FullContext:
    """A method that keeps everything and passes everything on."""

    def choose(self, layer: LayerView) -> Choice:
        return Choice([list(range(len(held))) for held in layer.entries])


@dataclass(frozen=True)
class StreamingLLM:
    """Keeps the first `num_sinks` positions, the first `protect`, and the most recent tokens."""

    retention_rate: float | None = 0.1
    num_sinks: int = 4
    retention_tokens: int | None = None
    protect: int = field(default=0, kw_only=True)

    def choose(self, layer: LayerView) -> Choice:
        kept = []
        first = max(self.num_sinks, self.protect)
        for held in layer.entries:
            positions = [entry.position for entry in held]
            count = budget(
                self.retention_rate,
                self.retention_tokens,
                seen=layer.seen,
                available=len(held),
                protected=len(below(positions, first)),
            )
            kept.append(sinks_and_recent(positions, first, count))
        return Choice(kept)


@dataclass(frozen=True)
class SnapKV:
    """Keeps the window and the most salient entries, averaged over each KV group.

    With `group_first` the heads of a KV group are averaged before the pooling; with `peak_first` a
    salient token ranks above its neighbours, and later neighbours above earlier.
    """

    retention_rate: float | None = 0.1
    window_size: int = 8
    kernel_size: int = 7
    retention_tokens: int | None = None
    protect: int = field(default=0, kw_only=True)
    group_first: bool = field(default=False, kw_only=True)
    peak_first: bool = field(default=False, kw_only=True)

    def saliency(self, layer: LayerView) -> list[list[float]]:
        """Returns, per query head, the pooled scores of the keys before the window."""
        found = window_attention(layer, self.window_size)
        pool = max_pool_peak_first if self.peak_first else max_pool
        if not self.group_first:
            return [pool(row, self.kernel_size) for row in found]
        group = len(layer.queries) // len(layer.entries)
        pooled = []
        for first in range(0, len(found), group):
            mean = pool(head_mean(found[first : first + group]), self.kernel_size)
            pooled += [mean] * group
        return pooled

    def head_scores(self, layer: LayerView) -> list[list[float]]:
        """Returns, per KV head, the group's mean saliency of the keys before the window."""
        saliency = self.saliency(layer)
        group = len(layer.queries) // len(layer.entries)
        return [
            head_mean(saliency[first : first + group]) for first in range(0, len(saliency), group)
        ]

    def exempt(self, positions: Sequence[int]) -> list[int]:
        """Returns the indices of the protected `positions` outside the window."""
        return below(positions[: max(0, len(positions) - self.window_size)], self.protect)

    def count(self, layer: LayerView, available: int, protected: int) -> int:
        """Returns how many of `available` entries to keep, at least the `protected` ones."""
        return budget(
            self.retention_rate,
            self.retention_tokens,
            seen=layer.seen,
            available=available,
            protected=protected,
        )

    def choose(self, layer: LayerView) -> Choice:
        kept, margins = [], []
        for held, scores in zip(layer.entries, self.head_scores(layer), strict=True):
            exempt = self.exempt([entry.position for entry in held])
            protected = len(held) - len(scores) + len(exempt)
            count = self.count(layer, len(held), protected)
            kept.append(window_and_highest(scores, len(held), count, exempt))
            margins.append(margin(scores, kept[-1], exempt))
        return Choice(kept, margin=min(margins))


@dataclass(frozen=True)
class FastKV(SnapKV):
    """A SnapKV that passes on only the protected and most salient new tokens after one layer."""

    tsp_layer: int | None = None
    tsp_rate: float | None = 0.2
    tsp_tokens: int | None = None

    def choose(self, layer: LayerView) -> Choice:
        choice = super().choose(layer)
        tsp_layer = layer.num_layers // 2 - 1 if self.tsp_layer is None else self.tsp_layer
        assert 0 <= tsp_layer < layer.num_layers, "tsp_layer is not a layer of this model"
        if layer.layer_idx != tsp_layer:
            return choice
        passed, gap = pass_on(self, layer, self.tsp_rate, self.tsp_tokens)
        return Choice(choice.kept, passed, min(choice.margin, gap))


def pass_on(
    method: SnapKV, layer: LayerView, rate: float | None, tokens: int | None = None
) -> tuple[list[int], float]:
    """Chooses the new tokens to pass on, by `method`'s saliency averaged over all query heads."""
    new_len = len(layer.new_positions)
    group = len(layer.queries) // len(layer.entries)
    competing = max(0, new_len - method.window_size)
    exempt = method.exempt(layer.new_positions)
    count = budget(
        rate,
        tokens,
        seen=layer.seen,
        available=new_len,
        protected=new_len - competing + len(exempt),
    )
    own_columns = []
    for head, row in enumerate(method.saliency(layer)):
        first_new = len(layer.entries[head // group]) - new_len
        own_columns.append(row[first_new : first_new + competing])
    scores = head_mean(own_columns)
    passed = window_and_highest(scores, new_len, count, exempt)
    return passed, margin(scores, passed, exempt)
