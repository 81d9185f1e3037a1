"""A reference row with a bounded answer: layers evict between decoded tokens."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tests.integrations.support.comparison import NEAR_TIE, NearTieError, Row, Windowed
from tests.reference import Method
from tests.reference.decoding import Watched
from tests.reference.methods import LayerView


@dataclass(frozen=True)
class Bound:
    """The rule and the interval by which an answer is kept bounded."""

    # The method that decides what layers keep; it is shown the last decoded queries.
    chooses: Method
    every: int  # tokens of the row from one choice to the next
    observers: int  # number of last decoded queries that the method is shown


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
        count = min(self.bound.observers, len(self._observing))
        last = self._observing[len(self._observing) - count :]
        nearest = self.evict(Windowed(self.bound.chooses, self.windows), last)
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

    def _first_pass(
        self, token_ids: Sequence[int], positions: Sequence[int], last_layer: int
    ) -> LayerView:
        """Runs the first pass of a restart without changing the attention sums."""
        before = copy.deepcopy(self.sums)
        view = super()._first_pass(token_ids, positions, last_layer)
        self.sums = before
        return view
