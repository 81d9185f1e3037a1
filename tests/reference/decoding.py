"""Decodes one token at a time, greedily or with forced tokens, and evicts at intervals.

At each step, every head adds the attention of the step's query to running sums. Whenever `every`
tokens have been fed since the last choice, a method decides what each layer keeps, by the queries
of the last tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .attention import Entry, attention_probabilities
from .dense import Act
from .generation import LayerOutput, ReferenceState
from .indexed import IndexedState
from .methods import LayerView, Method
from .scored_methods import Scored


@dataclass(frozen=True)
class SummedView(LayerView):
    """A layer view with the sum of attention that each position has received, by KV head."""

    sums: Sequence[dict[int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Summed(Scored):
    """The rule of H2O: keeps entries by the attention they received from all queries so far."""

    def scores(self, layer: LayerView, head: int) -> list[float]:
        """Returns the attention sum of each entry of a KV head."""
        assert isinstance(layer, SummedView)
        return [layer.sums[head][entry.position] for entry in layer.entries[head]]


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

    def step(self, token: int) -> Tensor:
        """Feeds one token and returns its logits `[vocab]`."""
        self.decodes = True
        return self._decode(token)

    def _layer(
        self, layer_idx: int, hidden: Tensor, positions: Sequence[int], rotary: Sequence[int]
    ) -> LayerOutput:
        hidden, queries, grown = super()._layer(layer_idx, hidden, positions, rotary)
        group, scaling = len(queries) // len(grown), self._view(layer_idx, [], [], []).scaling
        for head, own in enumerate(queries):
            held, sums = grown[head // group], self.sums[layer_idx][head // group]
            given = attention_probabilities(own, positions, held, scaling)
            for entry, shares in zip(held, given.T.tolist(), strict=True):
                share = math.fsum(shares) / group
                sums[entry.position] = sums.get(entry.position, 0.0) + share
            if self.decodes:
                self.queries[layer_idx][head] += list(own)
        return hidden, queries, grown

    def _view(
        self,
        layer_idx: int,
        queries: Sequence[Tensor],
        positions: Sequence[int],
        entries: Sequence[Sequence[Entry]],
    ) -> LayerView:
        view = super()._view(layer_idx, queries, positions, entries)
        return SummedView(**vars(view), sums=self.sums[layer_idx])

    def evict(self, method: Method, positions: Sequence[int]) -> float:
        """Lets a method choose in every layer, by the last decoded queries, at `positions`.

        Returns the smallest margin.
        """
        nearest, count = math.inf, len(positions)
        for index, held in enumerate(self.cache):
            size = held[0][-1].key.shape[0]
            queries = [
                torch.stack(own[-count:]) if count else torch.empty(0, size)
                for own in self.queries[index]
            ]
            choice = method.choose(self._view(index, queries, positions, held))
            nearest = min(nearest, choice.margin)
            self.cache[index] = [
                [entries[at] for at in kept]
                for entries, kept in zip(held, choice.kept, strict=True)
            ]
        return nearest


class WatchedIndexedState(Watched, IndexedState):
    """The watched context of a DeepSeek V3.2 model; see `BoundedState.kind`."""


@dataclass
class BoundedState:
    """A row that is read by a method and decoded under another one.

    Attributes:
        every: tokens from one choice to the next.
        observers: last decoded queries that are remembered.
        kind: class of the state, chosen by the kind of the model's layers.
    """

    model: PreTrainedModel
    method: Method
    rule: Method
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
                count = min(self.observers, len(state.queries[0][0]))
                last = range(state.seen - count, state.seen)
                since, nearest = 0, min(nearest, state.evict(self.rule, last))
                acts.append(Act(state.seen, state.seen, state.positions()))
        return Answer(torch.stack(logits), acts, min(nearest, state.nearest))
