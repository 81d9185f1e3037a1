"""Decodes one token at a time, greedily or with forced tokens, and evicts at intervals.

At each step, every head adds the attention of the step's query to running sums. Whenever `every`
tokens have been fed since the last choice, a rule decides what each head keeps.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .attention import Entry, attention_probabilities
from .dense import Act
from .generation import LayerOutput, ReferenceState
from .methods import Method
from .scored_methods import two_minus_cosines
from .selection import (
    below,
    budget,
    head_mean,
    margin,
    max_pool,
    sinks_and_recent,
    window_and_highest,
)


@dataclass
class HeadView:
    """The data of one KV head that a rule may use: its entries, queries and attention sums.

    Attributes:
        entries: the entries held, by ascending position, the newest last.
        queries: per query head of the group the last decoded queries `[count, head_dim]`.
        query_positions: positions of these queries.
        sums: by position, the attention of all queries since the first of the prompt, averaged over
            the group.
        scaling: factor on the products.
    """

    entries: Sequence[Entry]
    queries: Sequence[Tensor]
    query_positions: Sequence[int]
    sums: dict[int, float]
    scaling: float


class Rule(Protocol):
    """A rule that decides which entries a KV head keeps."""

    def keep(self, head: HeadView) -> tuple[list[int], float]:
        """Returns ascending indices of the entries to keep, and the choice's smallest score gap."""


@dataclass(frozen=True)
class Rolling:
    """A rule that keeps the first `num_sinks` positions and the most recent, `tokens` in all."""

    tokens: int
    num_sinks: int = 4

    def keep(self, head: HeadView) -> tuple[list[int], float]:
        """Keeps the first and the most recent positions."""
        positions = [entry.position for entry in head.entries]
        count = min(self.tokens, len(positions))
        return sinks_and_recent(positions, self.num_sinks, count), math.inf


@dataclass(frozen=True)
class ByScore:
    """A rule that keeps the last `window` entries and the highest scores, `tokens` in all."""

    tokens: int
    window: int = 8
    protect: int = field(default=0, kw_only=True)

    def scores(self, head: HeadView) -> list[float]:
        """Returns a score for each entry before the window."""
        raise NotImplementedError

    def scale(self, head: HeadView) -> float | None:
        """Returns the scale that score gaps are divided by if scores may be negative; else None."""
        return None

    def doubt(self, head: HeadView) -> float:
        """Returns the smallest distance of any score to a discontinuity; here infinity."""
        return math.inf

    def keep(self, head: HeadView) -> tuple[list[int], float]:
        """Keeps the window, the protected entries and the highest scores."""
        length = len(head.entries)
        before = max(length - self.window, 0)
        exempt = below([entry.position for entry in head.entries[:before]], self.protect)
        always = length - before + len(exempt)
        count = budget(None, self.tokens, seen=length, available=length, protected=always)
        scores = self.scores(head)[:before]
        kept = window_and_highest(scores, length, count, exempt)
        gap = margin(scores, kept, exempt, scale=self.scale(head))
        return kept, gap if math.isinf(gap) else min(gap, self.doubt(head))

    def attention(self, head: HeadView, last: int) -> list[list[float]]:
        """Returns, per query head, the sum of the last queries' attention to each entry."""
        rows = []
        for queries in head.queries:
            given = attention_probabilities(
                queries[-last:], head.query_positions[-last:], head.entries, head.scaling
            )
            rows.append([math.fsum(given[:, key].tolist()) for key in range(len(head.entries))])
        return rows


@dataclass(frozen=True)
class RunningSums(ByScore):
    """The rule of H2O: scores are sums of the attention at every step."""

    def scores(self, head: HeadView) -> list[float]:
        return [head.sums[entry.position] for entry in head.entries]


@dataclass(frozen=True)
class LastAttention(ByScore):
    """The rule of TOVA: scores are the attention of the last query."""

    window: int = 1

    def scores(self, head: HeadView) -> list[float]:
        return head_mean(self.attention(head, 1))


@dataclass(frozen=True)
class Window(ByScore):
    """The rule of SnapKV: scores are the max-pooled attention of the last queries."""

    kernel_size: int = 7

    def scores(self, head: HeadView) -> list[float]:
        before = max(len(head.entries) - self.window, 0)
        rows = self.attention(head, self.window)
        return head_mean([max_pool(row[:before], self.kernel_size) for row in rows])


@dataclass(frozen=True)
class Unlike(ByScore):
    """The rule of KeyDiff: keys that point away from the keys' mean direction score high."""

    def scores(self, head: HeadView) -> list[float]:
        return two_minus_cosines(head.entries)


@dataclass(frozen=True)
class Redundancy(ByScore):
    """The rule of R-KV: scores weigh the last queries' attention against key similarity."""

    kernel_size: int = 7
    importance: float = 0.1
    threshold: float = 0.5

    def scores(self, head: HeadView) -> list[float]:
        return self.weighed(self.importances(head), self.redundancy(head.entries))

    def importances(self, head: HeadView) -> list[float]:
        """Returns the pooled attention that each entry before the window receives."""
        before = max(len(head.entries) - self.window, 0)
        if not before:
            return []
        weights = [0.0] * before
        count = min(self.window, len(head.queries[0]))
        for row in range(-count, 0):
            logits = [
                max(float(queries[row] @ entry.key) for queries in head.queries) * head.scaling
                for entry in head.entries[:before]
            ]
            for key, weight in enumerate(softmax(logits)):
                weights[key] += weight / count
        return max_pool(weights, self.kernel_size)

    def weighed(self, importances: Sequence[float], copies: Sequence[float]) -> list[float]:
        """Returns `importance * one - (1 - importance) * other` for each pair."""
        pairs = zip(importances, copies, strict=False)
        return [self.importance * one - (1 - self.importance) * other for one, other in pairs]

    def redundancy(self, entries: Sequence[Entry]) -> list[float]:
        """Returns the softmax of each key's mean cosine with other keys, less the newest copy."""
        sums = [0.0] * len(entries)
        for row, likeness in enumerate(cosines(entries)):
            alike = [
                key for key, each in enumerate(likeness) if each > self.threshold and key != row
            ]
            for key, each in enumerate(likeness):
                if key != row and key != max(alike, default=row):
                    sums[key] += each
        return softmax([total / len(entries) for total in sums])

    def scale(self, head: HeadView) -> float | None:
        """Returns the mean value of a softmax over all keys."""
        return 1 / len(head.entries)

    def doubt(self, head: HeadView) -> float:
        """Returns ten times the smallest gap between a deciding cosine and the threshold."""
        nearest = math.inf
        for row, likeness in enumerate(cosines(head.entries)):
            others = [key for key in range(len(likeness)) if key != row]
            newest = max((key for key in others if likeness[key] > self.threshold), default=-1)
            deciding = [key for key in others if key >= newest]
            gaps = [abs(likeness[key] - self.threshold) for key in deciding]
            nearest = min([nearest, *gaps])
        return 10 * nearest  # a cosine is rounded less than a saliency


def cosines(entries: Sequence[Entry]) -> list[list[float]]:
    """Returns the cosines between all pairs of keys."""
    unit = torch.stack([entry.key.double() / entry.key.double().norm() for entry in entries])
    found: list[list[float]] = (unit @ unit.T).tolist()
    return found


def softmax(values: Sequence[float]) -> list[float]:
    """Returns the softmax of a list."""
    highest_value = max(values)
    powers = [math.exp(value - highest_value) for value in values]
    return [power / math.fsum(powers) for power in powers]


@dataclass
class Answer:
    """The results of decoding with eviction.

    Attributes:
        logits: `[steps, vocab]`.
        acts: the prompt's act and one for every choice, as `dense.visible_after` takes them.
        margin: the smallest margin of any choice, or of any pick of a layer's indexer.
    """

    logits: Tensor
    acts: list[Act]
    margin: float


class Watched(ReferenceState):
    """A context that stores the decoded queries and sums the attention of all queries.

    Attributes:
        nearest: the smallest margin with which a layer's indexer picked; infinity without one.
        sums: per layer and KV head, by position, the attention of all queries since the first of
            the prompt, averaged over the group.
        queries: per layer and query head the queries of the decoded tokens.
        decodes: whether tokens are now decoded, not read as a prompt.
    """

    nearest: float = math.inf

    def __init__(self, model: PreTrainedModel, *arguments: Any) -> None:
        super().__init__(model, *arguments)
        query_heads = int(cast(Any, model).config.num_attention_heads)
        self.sums: list[list[dict[int, float]]] = [
            [{} for _ in range(heads)] for heads in self._heads_held()
        ]
        self.queries: list[list[list[Tensor]]] = [
            [[] for _ in range(query_heads)] for _ in self.cache
        ]
        self.decodes = False

    def scaling(self, layer: int) -> float:
        """Returns the factor by which a layer's query-key products are scaled."""
        return self._view(layer, [], [], []).scaling

    def step(self, token: int) -> Tensor:
        """Feeds one token and returns its logits `[vocab]`."""
        self.decodes = True
        return self._decode(token)

    def _layer(
        self, layer_idx: int, hidden: Tensor, positions: Sequence[int], rotary: Sequence[int]
    ) -> LayerOutput:
        hidden, queries, grown = super()._layer(layer_idx, hidden, positions, rotary)
        group = len(queries) // len(grown)
        for head, own in enumerate(queries):
            held, sums = grown[head // group], self.sums[layer_idx][head // group]
            given = attention_probabilities(own, positions, held, self.scaling(layer_idx))
            for entry, shares in zip(held, given.T.tolist(), strict=True):
                share = math.fsum(shares) / group
                sums[entry.position] = sums.get(entry.position, 0.0) + share
            if self.decodes:
                self.queries[layer_idx][head] += list(own)
        return hidden, queries, grown


@dataclass
class BoundedState:
    """A row that is read by a method and decoded under a rule.

    Attributes:
        every: tokens from one choice to the next.
        observers: last decoded queries that are remembered.
        kind: class of the state, chosen by the kind of the model's layers.
    """

    model: PreTrainedModel
    method: Method
    rule: Rule
    every: int
    observers: int = 8
    kind: type[Watched] = Watched

    @torch.no_grad()
    def answer(self, prompt: Sequence[int], forced: Sequence[int]) -> Answer:
        """Reads a prompt and feeds the `forced` tokens; heads evict after every `every` tokens."""
        state = self.kind(self.model, self.method)
        turn = state.turn(prompt, 0)
        acts, nearest, logits, since = [turn.act], turn.margin, [], 0
        for token in forced:
            logits.append(state.step(token))
            since += 1
            if since == self.every:
                since, gap = 0, self._choose(state)
                nearest = min(nearest, gap)
                acts.append(Act(state.seen, state.seen, state.positions()))
        return Answer(torch.stack(logits), acts, min(nearest, state.nearest))

    def _choose(self, state: Watched) -> float:
        nearest = math.inf
        for layer, heads in enumerate(state.cache):
            group = len(state.queries[layer]) // len(heads)
            for head, held in enumerate(heads):
                own = state.queries[layer][head * group : (head + 1) * group]
                count = min(self.observers, len(own[0]))
                view = HeadView(
                    held,
                    [torch.stack(each[-count:]) for each in own],
                    list(range(state.seen - count, state.seen)),
                    state.sums[layer][head],
                    state.scaling(layer),
                )
                kept, gap = self.rule.keep(view)
                nearest = min(nearest, gap)
                heads[head] = [held[index] for index in kept]
        return nearest
