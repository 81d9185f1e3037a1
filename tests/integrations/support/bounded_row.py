"""A reference row with a bounded answer: layers evict between decoded tokens."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.integrations.support.comparison import NEAR_TIE, NearTieError, Row, Windowed
from tests.reference import Method
from tests.reference.attention import Entry
from tests.reference.decoding import HeadView, Rule, Watched
from tests.reference.methods import Choice, LayerView
from tests.reference.scored_methods import Scored


@dataclass(frozen=True)
class Bound:
    """The rule and the interval by which an answer is kept bounded."""

    # The method that decides what layers keep; it is shown the last decoded queries.
    chooses: Method
    every: int  # tokens of the row from one choice to the next
    observers: int  # number of last decoded queries that the method is shown


@dataclass(frozen=True)
class SummedView(LayerView):
    """A layer view with the sum of attention that each position has received."""

    sums: Sequence[dict[int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Summed(Scored):
    """A method that scores entries by the attention they received from all queries so far."""

    def scores(self, layer: LayerView, head: int) -> list[float]:
        """Returns the attention sum of each entry of a KV head."""
        assert isinstance(layer, SummedView)
        return [layer.sums[head][entry.position] for entry in layer.entries[head]]


@dataclass(frozen=True)
class HeadByHead:
    """A method that applies a decoding rule to each KV head on its own."""

    rule: Rule

    def choose(self, layer: LayerView) -> Choice:
        """Keeps the entries that the rule keeps in each head, and passes all tokens on."""
        group = len(layer.queries) // len(layer.entries)
        kept, margins = [], []
        for head, held in enumerate(layer.entries):
            own = layer.queries[head * group : (head + 1) * group]
            view = HeadView(held, own, layer.new_positions, {}, layer.scaling)
            indices, gap = self.rule.keep(view)
            kept.append(indices)
            margins.append(gap)
        return Choice(kept, margin=min(margins))


class BoundedRow(Watched, Row):
    """A `Row` whose layers evict, in `settle`, after every ``bound.every`` decoded tokens."""

    def __init__(self, *arguments: Any, bound: Bound) -> None:
        super().__init__(*arguments)
        self.bound = bound
        self._observing: list[int] = []  # positions of the decoded queries
        self._before: list[Any] = []  # the sums before each column that was appended

    def act(self, tokens: Sequence[int]) -> Tensor:
        self.queries = [[[] for _ in layer] for layer in self.queries]
        self._observing, self._before, self.decodes = [], [], False
        return super().act(tokens)

    def feed(self, token: int | None) -> Tensor | None:
        self._before.append(copy.deepcopy(self.sums))
        self.decodes = True
        if token is not None:
            self._observing.append(self.seen)
        return super().feed(token)

    def take_back(self, columns: int) -> None:
        for _ in range(columns):
            self.sums = copy.deepcopy(self._before.pop())
            if self.appended[-1]:
                self._observing.pop()
                for own in (own for layer in self.queries for own in layer):
                    own.pop()
            super().take_back(1)

    def settle(self) -> bool:
        if sum(self.appended) < self.bound.every:
            return False
        method = Windowed(self.bound.chooses, self.windows)
        count = min(self.bound.observers, len(self._observing))
        first, nearest = len(self._observing) - count, math.inf
        for index, held in enumerate(self.cache):
            size = held[0][-1].key.shape[0]
            queries = [
                torch.stack(own[first:]) if count else torch.empty(0, size)
                for own in self.queries[index]
            ]
            choice = method.choose(self._view(index, queries, self._observing[first:], held))
            nearest = min(nearest, choice.margin)
            self.cache[index] = [
                [entries[at] for at in kept]
                for entries, kept in zip(held, choice.kept, strict=True)
            ]
        self.appended, self._before = [], []
        if nearest < NEAR_TIE:
            raise NearTieError
        return True

    def fork(self) -> "BoundedRow":
        other = super().fork()
        assert isinstance(other, BoundedRow)
        other.sums = copy.deepcopy(self.sums)
        other.queries = [[list(own) for own in layer] for layer in self.queries]
        other._observing, other._before = list(self._observing), list(self._before)
        return other

    def _view(
        self,
        layer_idx: int,
        queries: Sequence[Tensor],
        positions: Sequence[int],
        entries: Sequence[Sequence[Entry]],
    ) -> LayerView:
        view = super()._view(layer_idx, queries, positions, entries)
        return SummedView(**vars(view), sums=self.sums[layer_idx])

    def _first_pass(
        self, token_ids: Sequence[int], positions: Sequence[int], last_layer: int
    ) -> LayerView:
        """Runs the first pass of a restart without changing the attention sums."""
        before = copy.deepcopy(self.sums)
        view = super()._first_pass(token_ids, positions, last_layer)
        self.sums = before
        return view
