"""Methods that drop tokens during prefill: CLAA, UniPrefill, PromptDistill and others."""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .attention import attention_probabilities
from .methods import Choice, FullContext, LayerView, SnapKV, window_attention
from .selection import average_pool, budget, head_mean, margin, window_and_highest


def products(query: Tensor, layer: LayerView, head: int) -> list[float]:
    """Returns the products of one head's query with all entries of its KV head, in float64."""
    group = len(layer.queries) // len(layer.entries)
    held = layer.entries[head // group]
    return [float(query.double() @ entry.key.double()) for entry in held]


def group_of(rows: Sequence[Sequence[float]], layer: LayerView) -> list[list[float]]:
    """Returns the mean over each KV head's query heads."""
    group = len(rows) // len(layer.entries)
    return [head_mean(rows[first : first + group]) for first in range(0, len(rows), group)]


@dataclass(frozen=True)
class CLAA(SnapKV):
    """Keeps tokens by average-pooled window attention; drops tokens by a vote of several layers."""

    tsp_layer: int = 1
    tsp_rate: float = 0.2
    voting_layers: int = 4
    whole_layers: int = 4
    standardize: bool = True
    spans: int = 1

    def saliency(self, layer: LayerView) -> list[list[float]]:
        rows = window_attention(layer, self.window_size)
        return [average_pool(row, self.kernel_size) for row in rows]

    def choose(self, layer: LayerView) -> Choice:
        kept = super().choose(layer)
        if layer.layer_idx < self.whole_layers:
            kept = FullContext().choose(layer)
        new_len = len(layer.new_positions)
        competing = max(0, new_len - self.window_size)
        own = []
        for row in self.of_kv_heads(self.saliency(layer), layer):
            own.append(self.scaled(row[len(row) - competing :]))
        layer.notes[layer.layer_idx] = own
        if layer.layer_idx != self.tsp_layer:
            return kept
        asked = sorted(at for at in layer.notes if at <= self.tsp_layer)
        votes = [row for at in asked[-self.voting_layers :] for row in layer.notes[at]]
        scores = average_pool([max(column) for column in zip(*votes, strict=True)], self.spans)
        exempt = self.exempt(layer.new_positions)
        count = budget(
            self.tsp_rate,
            None,
            seen=layer.seen,
            available=new_len,
            protected=new_len - competing + len(exempt),
        )
        passed = window_and_highest(scores, new_len, count, exempt)
        scale = max(map(abs, scores), default=1.0)
        gap = margin(scores, passed, exempt, scale=scale)
        return Choice(kept.kept, passed, min(kept.margin, gap))

    def of_kv_heads(self, rows: list[list[float]], layer: LayerView) -> list[list[float]]:
        return group_of(rows, layer)

    def scaled(self, row: list[float]) -> list[float]:
        """Standardizes a row to mean 0 and deviation 1 if `standardize` is set."""
        if not self.standardize or not row:
            return row
        mean, deviation = statistics.fmean(row), statistics.pstdev(row)
        return [(score - mean) / (deviation + 1e-8) for score in row]


@dataclass(frozen=True)
class Dropper(FullContext):
    """Base of methods that keep all entries and, after some layers, pass on the highest scores."""

    stages: tuple[tuple[int, float], ...] = ()
    window_size: int = 1
    protect: int = 0

    def scores(self, layer: LayerView) -> list[float]:
        """Returns a score for each new token."""
        raise NotImplementedError

    def choose(self, layer: LayerView) -> Choice:
        kept = super().choose(layer)
        rates = dict(self.stages)
        if layer.layer_idx not in rates:
            return kept
        new_len = len(layer.new_positions)
        scores = self.scores(layer)[: max(0, new_len - self.window_size)]
        exempt = [
            index
            for index, position in enumerate(layer.new_positions[: len(scores)])
            if position < self.protect
        ]
        count = budget(
            rates[layer.layer_idx],
            None,
            seen=layer.seen,
            available=new_len,
            protected=new_len - len(scores) + len(exempt),
        )
        passed = window_and_highest(scores, new_len, count, exempt)
        scale = max(map(abs, scores), default=1.0)
        return Choice(kept.kept, passed, margin(scores, passed, exempt, scale=scale))


@dataclass(frozen=True)
class PromptDistill(Dropper):
    """Drops tokens by pooled products with the last query; the last token scores 0."""

    kernel_size: int = 5

    def scores(self, layer: LayerView) -> list[float]:
        rows = []
        for head, queries in enumerate(layer.queries):
            raw = [*products(queries[-1], layer, head)[:-1], 0.0]
            rows.append(average_pool(raw, self.kernel_size)[-len(layer.new_positions) :])
        return head_mean(rows)


@dataclass(frozen=True)
class LazyLLM(Dropper):
    """Drops tokens by the attention of the last token."""

    def scores(self, layer: LayerView) -> list[float]:
        return window_means(layer, 1)


@dataclass(frozen=True)
class SlimInfer(Dropper):
    """Drops blocks of tokens by their best unit: its mean key times the mean last query."""

    unit_size: int = 8
    block_units: int = 8

    def scores(self, layer: LayerView) -> list[float]:
        group = len(layer.queries) // len(layer.entries)
        strength: dict[int, list[float]] = defaultdict(list)
        for head, queries in enumerate(layer.queries):
            query = queries[-self.window_size :].double().mean(dim=0)
            of_unit: dict[int, list[Tensor]] = defaultdict(list)
            for entry in layer.entries[head // group]:
                of_unit[entry.position // self.unit_size].append(entry.key.double())
            for unit, keys in of_unit.items():
                mean = sum(keys[1:], keys[0]) / len(keys)
                strength[unit].append(abs(float(query @ mean)))
        of_block: dict[int, float] = defaultdict(float)
        for unit, strengths in strength.items():
            at = unit // self.block_units
            of_block[at] = max(of_block[at], math.fsum(strengths) / len(layer.queries))
        size = self.unit_size * self.block_units
        return [of_block[position // size] for position in layer.new_positions]


def window_means(layer: LayerView, window_size: int) -> list[float]:
    """Returns the last queries' attention to each new token, averaged over all heads."""
    group = len(layer.queries) // len(layer.entries)
    rows = []
    for head, queries in enumerate(layer.queries):
        given = attention_probabilities(
            queries[-window_size:],
            layer.new_positions[-window_size:],
            layer.entries[head // group],
            layer.scaling,
        )
        sums = [math.fsum(column.tolist()) / len(column) for column in given.T]
        rows.append(sums[len(sums) - len(layer.new_positions) :])
    return head_mean(rows)


@dataclass(frozen=True)
class UniPrefill(FullContext):
    """Keeps all entries and passes on the top blocks that hold a share of the attention."""

    layers: tuple[int, ...] = ()
    mass: float = 0.99
    block_size: int = 64
    num_sinks: int = 128
    window_size: int = 128

    def choose(self, layer: LayerView) -> Choice:
        kept = super().choose(layer)
        if layer.layer_idx not in self.layers:
            return kept
        scores = window_means(layer, self.window_size)
        passed, gap = self.passed(scores, layer.new_positions)
        return Choice(kept.kept, passed, gap)

    def passed(self, scores: Sequence[float], positions: Sequence[int]) -> tuple[list[int], float]:
        """Returns the tokens passed on, and the smallest score gap of that choice."""
        starts = range(0, len(scores), self.block_size)
        masses = [math.fsum(scores[start : start + self.block_size]) for start in starts]
        total, before = math.fsum(masses), 0.0
        going, gaps = set[int](), []
        for block in sorted(range(len(masses)), key=lambda block: (-masses[block], block)):
            gaps.append(abs(before - self.mass * total) / total)
            if before <= self.mass * total:
                going.add(block)
            before += masses[block]
        gaps.append(margin(masses, going, scale=total))
        tokens = [
            index
            for index, position in enumerate(positions)
            if index // self.block_size in going
            or position < self.num_sinks
            or index >= len(scores) - self.window_size
        ]
        return tokens, min(gaps)
