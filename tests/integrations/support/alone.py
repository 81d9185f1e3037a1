"""A batch beside each of its rows alone, and each row beside the model's own dense attention.

For models of any kind of layer: a row alone is read straight on, without padding, chunks, drafts or
buffers, by a cache of its own; and once more whole, by the model's own code without a cache, under
the mask of what the row's cache held at every token.
"""

import copy
from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy import CachePolicy
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import FullContext
from tests.integrations.decoding.support import Kept, held
from tests.integrations.fuzz.side_by_side import SideBySide
from tests.integrations.model.builds.dense import COUNTED, Seen, dense_logits, seen_of
from tests.integrations.support.comparison import Columns
from tests.reference import random_tokens

# A batch multiplies matrices otherwise than a row alone, and experts are sent other tokens then.
TOLERANCE = 3e-4


@attrs.define
class Acted:
    """What an act left of its prompt."""

    start: int
    end: int
    passed: dict[int, list[int]]


@attrs.define
class AloneRow:
    """One row, read by a cache of its own."""

    model: PreTrainedModel  # the model
    cache: PolicyCache  # the cache that reads the row
    every: int | None = None  # tokens between two choices of a bounded answer; None without a bound
    said: list[int] = attrs.field(factory=list)  # the row's tokens
    # For each column since the last act, whether it is a token and not padding.
    appended: list[bool] = attrs.field(factory=list)
    acts: list[Acted] = attrs.field(factory=list)  # the policy's acts
    # By number of tokens read when layers chose, what they held then; the last counts.
    kept: dict[int, Kept] = attrs.field(factory=dict)
    # By number of tokens read, the logits after them.
    logits: dict[int, Tensor] = attrs.field(factory=dict)

    @property
    def seen(self) -> int:
        return len(self.said)

    def act(self, tokens: Sequence[int]) -> Tensor:
        """Reads a prompt and returns the logits `[vocab]` after its last token."""
        if self.said:
            self.cache.start_turn()
        start = self.seen
        logits = self._read(tokens)[-1]
        passed = {
            layer: [place for place in positions[0].tolist() if place >= 0]
            for layer, positions in self.cache.propagated.items()
        }
        self.acts.append(Acted(start, self.seen, passed))
        self._chose()
        return logits

    def feed(self, token: int | None) -> Tensor | None:
        return self.feed_all([token])[0]

    def feed_all(self, tokens: Sequence[int | None]) -> list[Tensor | None]:
        """Appends the columns of one forward; returns the logits of each, None for padding."""
        own = [token for token in tokens if token is not None]
        logits = iter(self._read(own) if own else ())
        self.appended += [token is not None for token in tokens]
        return [None if token is None else next(logits) for token in tokens]

    def take_back(self, columns: int) -> None:
        """Removes the last ``columns`` columns that were appended."""
        count = sum(self.appended[len(self.appended) - columns :]) if columns else 0
        del self.appended[len(self.appended) - columns :]
        if not count:
            return
        self.cache.crop(-count)
        del self.said[-count:]
        self.logits = {place: each for place, each in self.logits.items() if place <= self.seen}

    def settle(self) -> bool:
        """Notes what layers hold if they have just chosen, and returns whether they have."""
        if self.every is None or sum(self.appended) < self.every:
            return False
        self._chose()
        return True

    def fork(self) -> "AloneRow":
        """Returns a copy that can be fed independently of this row."""
        return AloneRow(
            self.model,
            copy.copy(self.cache),
            self.every,
            list(self.said),
            list(self.appended),
            list(self.acts),
            dict(self.kept),
            dict(self.logits),
        )

    def check(self) -> None:
        """Asserts that all logits so far are those of dense attention to what was held."""
        policy = self.cache.policy
        if policy.gapless or not self.acts:  # keys that are turned again are no mask's affair
            return
        places = {place: place for place in range(self.seen)}
        if policy.propagation.restarts:  # what was left out has no place
            out = {
                place
                for act in self.acts
                for passed in act.passed.values()
                for place in set(range(act.start, act.end)) - set(passed)
            }
            left = [place for place in range(self.seen) if place not in out]
            places = {place: index for index, place in enumerate(left)}
        want = dense_logits(
            self.model,
            [self.said[place] for place in places],
            places[self.acts[-1].end - 1] + 1,
            self._seen(places),
            tiled=self.model.config.model_type == "jetmoe",
        )
        for count, logits in self.logits.items():
            assert_alike(logits, want[places[count - 1]])

    def _seen(self, places: dict[int, int]) -> list[Seen]:
        """Returns, for each layer, which keys every token sees; `places` are those of positions."""
        kept = {
            self._place(count, places): [
                [[places[each] for each in head] for head in layer] for layer in rows[0]
            ]
            for count, rows in self.kept.items()
        }
        restarts = self.cache.policy.propagation.restarts
        passed = [
            (
                slice(self._place(act.start, places), self._place(act.end, places)),
                {} if restarts else act.passed,
            )
            for act in self.acts
        ]
        producers = [layer.producer for layer in self.cache.layers]
        return seen_of(kept, len(places), passed, producers)

    @staticmethod
    def _place(position: int, places: dict[int, int]) -> int:
        """Returns how many tokens before a position have a place."""
        return sum(each < position for each in places)

    def _chose(self) -> None:
        self.appended = []
        self.kept[self.seen] = held(self.cache, 1)

    @torch.no_grad()
    def _read(self, tokens: Sequence[int]) -> Tensor:
        """Reads tokens and returns the logits of those that went through all layers."""
        ids = torch.tensor([list(tokens)])
        end = self.seen + len(tokens)
        given = {"input_ids": ids, "attention_mask": torch.ones(1, end, dtype=torch.int64)}
        # Which `generate` gives, and without which these count from elsewhere.
        if self.model.config.model_type in (*COUNTED, "bamba"):
            given["position_ids"] = torch.arange(self.seen, end)[None]
        with self.cache.attached(self.model):
            output: Any = self.model(**given, cache=self.cache)
        self.said += tokens
        logits: Tensor = output.logits[0]
        whole = range(len(logits)) if len(logits) == len(tokens) else [len(logits) - 1]
        for index in whole:
            self.logits[self.seen - len(logits) + 1 + index] = logits[index]
        return logits


# One step of four bits over numbers of both signs: groups of a batch may be other ones than alone.
ROUNDED = 2 / 15


@attrs.define
class BesideAlone(SideBySide):
    """What a user may do with a cache, done to the cache and to each of its rows alone."""

    tolerance: ClassVar[float] = TOLERANCE
    rows: list[Any] = attrs.field(factory=list)
    rounds: bool = False  # whether what is held is rounded, so that nothing is quite the same

    def new_row(self) -> Any:
        every = None if self.policy.decoding is None else self.policy.decoding.every
        return AloneRow(self.model, PolicyCache(self.policy, self.cache.storage), every)

    def assert_close(self, got: Tensor, expected: Tensor) -> None:
        assert_alike(got, expected, ROUNDED if self.rounds else TOLERANCE)

    def close(self) -> None:
        super().close()
        for row in self.rows if not self.rounds else ():
            row.check()

    def _chosen(self) -> None:
        self.appended = 0

    def _check_row(self, index: int, row: Any) -> None:
        for layer, alone in zip(self.cache.layers, row.cache.layers, strict=True):
            if alone.positions is None:
                assert layer.positions is None
            elif layer.producer is None:
                self._check_layer(index, layer, alone)
            for one, other in zip(_states(layer), _states(alone), strict=True):
                self.assert_close(one[index], other[0])
        assert set(row.acts[-1].passed) <= set(self.cache.propagated)
        for number, positions in self.cache.propagated.items():
            own = [place for place in positions[index].tolist() if place >= 0]
            assert own == row.acts[-1].passed.get(number, own)

    def _check_layer(self, index: int, layer: Any, alone: Any) -> None:
        """Asserts that a layer holds the same tokens under the same keys."""
        own, want = layer.positions[index], alone.positions[0]
        for head in range(len(want)):
            assert own[head][own[head] >= 0].tolist() == want[head][want[head] >= 0].tolist()
        for one, other in zip(_tensors(layer), _tensors(alone), strict=True):
            heads = len(other[0])
            there, here = (each.expand(heads, -1) >= 0 for each in (own, want))
            self.assert_close(one[index][there], other[0][here])

    def _check_report(self) -> None:
        """Nothing: bytes are counted beside the slow reference."""


def read_two_turns(
    model: PreTrainedModel, policy: CachePolicy, lens: Sequence[int], added: Sequence[int]
) -> PolicyCache:
    """Reads and answers rows in two turns, beside each alone; returns the cache of all rows.

    Unless everything was kept, what was left out must matter for the last token.
    """
    side = BesideAlone(model, model, (), policy, None, PolicyCache(policy))  # type: ignore[arg-type]
    for turn, counts in enumerate((lens, added)):
        rows = [random_tokens(10 * turn + row, count) for row, count in enumerate(counts)]
        new: Columns = [[*[None] * (max(counts) - len(row)), *row] for row in rows]
        side.generate(new, [0] * len(rows), count=4)
        side.check()
    side.close()
    found = [row.logits[row.seen] for row in side.rows]
    whole = [dense_logits(model, row.said, row.seen)[-1] for row in side.rows]
    apart = max(
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, whole, strict=True)
    )
    assert (apart > 1e-2) is (policy != FullContext())
    return side.cache


def assert_alike(got: Tensor, want: Tensor, tolerance: float = TOLERANCE) -> None:
    """Asserts equal shapes, and no difference that matters beside the largest number."""
    assert got.shape == want.shape
    if want.numel():
        difference = float((got - want).abs().max() / want.abs().max().clamp(min=1.0))
        assert difference <= tolerance, f"differs by {difference}"


def _tensors(layer: Any) -> list[Tensor]:
    """What a layer holds of every token."""
    index = list(layer.index.read()) if getattr(layer, "index", None) is not None else []
    return [layer.keys, layer.values, *(each.float() for each in index if each.shape[3])]


def _states(layer: Any) -> list[Tensor]:
    parts = getattr(layer, "states", ())
    return [each for part in parts for each in part.values()]
