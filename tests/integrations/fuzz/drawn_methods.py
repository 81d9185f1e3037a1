"""Methods of the reference beyond those of `tests.reference`, for policies that are drawn."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.reference import GemFilter, Method, Scored, SnapKV
from tests.reference.methods import Choice, LayerView, pass_on
from tests.reference.scored_methods import norm
from tests.reference.selection import below, budget, window_and_highest

# Rate and number of tokens of a budget, one of them None.
Amount = tuple[float | None, int | None]


@dataclass(frozen=True)
class KeyNorm(Scored):
    """By how short the key is."""

    def scores(self, layer: LayerView, head: int) -> list[float]:
        """The inverse of the norm."""
        return [1 / norm(entry) for entry in layer.entries[head]]


@dataclass(frozen=True)
class Random(Scored):
    """By splitmix64 of the token's coordinates, in the unbounded integers of Python."""

    seed: int = 0

    def scores(self, layer: LayerView, head: int) -> list[float]:
        """Numbers in [0, 1), multiples of 2 to the power of -24."""
        return [self._number(layer, head, entry.position) for entry in layer.entries[head]]

    def _number(self, layer: LayerView, head: int, position: int) -> float:
        mask = 2**64 - 1
        state = position + head * 2**40 + layer.layer_idx * 2**52
        state = (state + (self.seed + 1) * 0x9E3779B97F4A7C15) & mask
        state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ state >> 27) * 0x94D049BB133111EB) & mask
        return ((state ^ state >> 31) >> 40) / 2**24


@dataclass(frozen=True)
class Ranked:
    """A score's highest, with any budget and with first tokens that always stay."""

    scored: Scored
    amount: Amount
    window_size: int
    protect: int

    def choose(self, layer: LayerView) -> Choice:
        """The window, the protected and the highest others per KV head, all tokens."""
        kept, margins = [], []
        for head, held in enumerate(layer.entries):
            outside = max(len(held) - self.window_size, 0)
            exempt = below([entry.position for entry in held[:outside]], self.protect)
            count = budget(
                *self.amount,
                seen=layer.seen,
                available=len(held),
                protected=len(held) - outside + len(exempt),
            )
            scores = self.scored.scores(layer, head)[:outside]
            kept.append(window_and_highest(scores, len(held), count, exempt))
            margins.append(self._margin(scores, kept[-1], exempt))
        return Choice(kept, margin=min(margins))

    def _margin(
        self, scores: Sequence[float], chosen: Sequence[int], exempt: Sequence[int]
    ) -> float:
        """As `selection.margin`, but equals are as near as can be: nothing here is pooled."""
        if isinstance(self.scored, Random):
            return math.inf  # no rounding
        competed = [index for index in range(len(scores)) if index not in exempt]
        kept = [scores[index] for index in competed if index in chosen]
        dropped = [scores[index] for index in competed if index not in chosen]
        if not (kept and dropped and max(kept)):  # without a query all are 0: the earlier stay
            return math.inf
        return 1 - max(dropped) / min(kept) if min(kept) else 0.0


@dataclass(frozen=True)
class SinksHeld:
    """The first tokens that a layer holds, the protected, and the most recent others."""

    amount: Amount
    num_sinks: int
    protect: int

    def choose(self, layer: LayerView) -> Choice:
        """The same for all KV heads that hold the same, all tokens."""
        kept = []
        for held in layer.entries:
            protected = below([entry.position for entry in held], self.protect)
            first = sorted({*range(min(self.num_sinks, len(held))), *protected})
            count = budget(*self.amount, seen=layer.seen, available=len(held), protected=len(first))
            others = [index for index in range(len(held)) if index not in first]
            recent = others[len(others) - (count - len(first)) :]
            kept.append(sorted(first + recent))
        return Choice(kept)


@dataclass(frozen=True)
class Dropping:
    """Any way to keep, and tokens dropped after some layers by the saliency of a window."""

    keeps: Method
    observes: SnapKV
    stages: tuple[tuple[int, Amount], ...]

    def choose(self, layer: LayerView) -> Choice:
        """What `keeps` keeps; at a stage's layer also the tokens to pass on."""
        choice = self.keeps.choose(layer)
        amounts = dict(self.stages)
        if layer.layer_idx not in amounts:
            return choice
        passed, gap = pass_on(self.observes, layer, *amounts[layer.layer_idx])
        return Choice(choice.kept, passed, min(choice.margin, gap))


@dataclass(frozen=True)
class Restarting(GemFilter):
    """A restart on fewer tokens, after which the second pass evicts."""

    keeps: Method = field(kw_only=True)
    observes: SnapKV | None = field(default=None, kw_only=True)

    def choose(self, layer: LayerView) -> Choice:
        """What `keeps` keeps; all tokens."""
        return self.keeps.choose(layer)

    def restart_on(self, layer: LayerView) -> tuple[list[int], float]:
        """The most salient of the new tokens."""
        if self.observes is None:
            return super().restart_on(layer)
        return pass_on(self.observes, layer, self.retention_rate, self.retention_tokens)
