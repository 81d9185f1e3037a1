"""The methods: which entries a layer keeps and which tokens go on, once the layer has attended."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from torch import Tensor

from .attention import Entry
from .selection import (
    budget,
    head_mean,
    highest,
    margin,
    sinks_and_recent,
    window_and_highest,
    window_saliency,
)


@dataclass(frozen=True)
class LayerView:
    """One layer during an act, after its attention.

    Attributes:
        layer_idx: which decoder layer.
        num_layers: decoder layers in the model.
        queries: per query head `[query_len, head_dim]`, of the new tokens that reached the layer.
        new_positions: positions of those tokens, ascending.
        entries: per KV head what was kept before and then the new tokens.
        seen: tokens of the row so far, the new ones included, those that were dropped as well.
        scaling: factor on the products of queries and keys.
    """

    layer_idx: int
    num_layers: int
    queries: Sequence[Tensor]
    new_positions: Sequence[int]
    entries: Sequence[Sequence[Entry]]
    seen: int
    scaling: float


@dataclass(frozen=True)
class Choice:
    """What a method decides at one layer.

    Attributes:
        kept: per KV head, ascending indices into its entries.
        passed: ascending indices into the new tokens, or None for all of them.
        margin: the smallest relative gap of any choice made here; see `selection.margin`.
    """

    kept: list[list[int]]
    passed: list[int] | None = None
    margin: float = field(default=inf)


@dataclass(frozen=True)
class FullContext:
    """Keeps everything and passes everything on."""

    def choose(self, layer: LayerView) -> Choice:
        """All entries, all tokens."""
        return Choice([list(range(len(held))) for held in layer.entries])


@dataclass(frozen=True)
class StreamingLLM:
    """Keeps the first `num_sinks` positions and the most recent tokens, to the budget.

    Attributes:
        retention_rate: fraction of all tokens seen; not used where `retention_tokens` is given.
        num_sinks: positions always kept.
        retention_tokens: budget as a number of tokens.
    """

    retention_rate: float | None = 0.1
    num_sinks: int = 4
    retention_tokens: int | None = None

    def choose(self, layer: LayerView) -> Choice:
        """Sinks and most recent entries, all tokens."""
        kept = []
        for held in layer.entries:
            count = budget(
                self.retention_rate,
                self.retention_tokens,
                seen=layer.seen,
                available=len(held),
                protected=self.num_sinks,
            )
            positions = [entry.position for entry in held]
            kept.append(sinks_and_recent(positions, self.num_sinks, count))
        return Choice(kept)


@dataclass(frozen=True)
class SnapKV:
    """Keeps the window and the highest window saliency, averaged over each KV group.

    Attributes:
        retention_rate: fraction of all tokens seen; not used where `retention_tokens` is given.
        window_size: last keys, always kept; as many last queries observe.
        kernel_size: odd width of the max-pooling.
        retention_tokens: budget as a number of tokens.
    """

    retention_rate: float | None = 0.1
    window_size: int = 8
    kernel_size: int = 7
    retention_tokens: int | None = None

    def saliency(self, layer: LayerView) -> list[list[float]]:
        """Per query head, pooled scores of the keys before the window."""
        return window_saliency(
            layer.queries,
            layer.new_positions,
            layer.entries,
            window_size=self.window_size,
            kernel_size=self.kernel_size,
            scaling=layer.scaling,
        )

    def choose(self, layer: LayerView) -> Choice:
        """The window and the most salient entries per KV head, all tokens."""
        saliency = self.saliency(layer)
        group = len(layer.queries) // len(layer.entries)
        kept, margins = [], []
        for head, held in enumerate(layer.entries):
            scores = head_mean(saliency[head * group : (head + 1) * group])
            count = budget(
                self.retention_rate,
                self.retention_tokens,
                seen=layer.seen,
                available=len(held),
                protected=self.window_size,
            )
            kept.append(window_and_highest(scores, len(held), count))
            margins.append(margin(scores, kept[-1]))
        return Choice(kept, margin=min(margins))


@dataclass(frozen=True)
class FastKV(SnapKV):
    """Keeps as SnapKV; after one layer only the most salient of the new tokens go on.

    Attributes:
        tsp_layer: the layer after which tokens are dropped; None is `num_layers // 2 - 1`.
        tsp_rate: fraction of all tokens seen; not used where `tsp_tokens` is given.
        tsp_tokens: number of tokens passed on.
    """

    tsp_layer: int | None = None
    tsp_rate: float | None = 0.2
    tsp_tokens: int | None = None

    def choose(self, layer: LayerView) -> Choice:
        """As SnapKV; at `tsp_layer` also the tokens to pass on."""
        choice = super().choose(layer)
        tsp_layer = layer.num_layers // 2 - 1 if self.tsp_layer is None else self.tsp_layer
        assert 0 <= tsp_layer < layer.num_layers, "tsp_layer is not a layer of this model"
        if layer.layer_idx != tsp_layer:
            return choice
        passed, gap = self.pass_on(layer)
        return Choice(choice.kept, passed, min(choice.margin, gap))

    def pass_on(self, layer: LayerView) -> tuple[list[int], float]:
        """Indices of the new tokens to pass on, ascending, and the margin of that choice."""
        new_len = len(layer.new_positions)
        group = len(layer.queries) // len(layer.entries)
        competing = max(0, new_len - self.window_size)
        count = budget(
            self.tsp_rate,
            self.tsp_tokens,
            seen=layer.seen,
            available=new_len,
            protected=self.window_size,
        )
        own_columns = []
        for head, row in enumerate(self.saliency(layer)):
            first_new = len(layer.entries[head // group]) - new_len
            own_columns.append(row[first_new : first_new + competing])
        scores = head_mean(own_columns)
        window = list(range(competing, new_len))
        chosen = highest(scores, count - len(window))
        return chosen + window, margin(scores, chosen)


Method = FullContext | StreamingLLM | SnapKV | FastKV
