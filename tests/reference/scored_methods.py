"""Methods that keep the last tokens and, per KV head, those of highest score."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from .attention import Entry, attention_probabilities
from .methods import Choice, LayerView
from .selection import below, budget, head_mean, margin, max_pool, window_and_highest


@dataclass(frozen=True)
class Scored:
    """Base of methods that keep the last entries, those that are exempt and the highest scores."""

    retention_rate: float | None = 0.1
    window_size: int = 8
    retention_tokens: int | None = field(default=None, kw_only=True)

    def scores(self, layer: LayerView, head: int) -> list[float]:
        """Returns a score for each entry of a KV head; the highest are kept."""
        raise NotImplementedError

    def exempt(self, positions: Sequence[int]) -> list[int]:
        """Returns the indices of the positions outside the window that are always kept."""
        return []

    def scale(self, competed: Sequence[float]) -> float | None:
        """Returns the scale that score gaps are divided by if scores may be negative; else None."""
        return None

    def choose(self, layer: LayerView) -> Choice:
        kept, margins = [], []
        for head, held in enumerate(layer.entries):
            outside = max(len(held) - self.window_size, 0)
            exempt = self.exempt([entry.position for entry in held[:outside]])
            always = len(held) - outside + len(exempt)
            count = budget(
                self.retention_rate,
                self.retention_tokens,
                seen=layer.seen,
                available=len(held),
                protected=always,
            )
            scores = self.scores(layer, head)[:outside]
            kept.append(window_and_highest(scores, len(held), count, exempt))
            competed = [score for index, score in enumerate(scores) if index not in exempt]
            margins.append(margin(scores, kept[-1], exempt, scale=self.scale(competed)))
        return Choice(kept, margin=min(margins))


def group_attention(layer: LayerView, head: int, observers: int | None) -> list[float]:
    """Returns the summed attention of the last queries to each entry, averaged over the group."""
    group = len(layer.queries) // len(layer.entries)
    held = layer.entries[head]
    rows = []
    for queries in layer.queries[head * group : (head + 1) * group]:
        first = 0 if observers is None else max(len(queries) - observers, 0)
        given = attention_probabilities(
            queries[first:], layer.new_positions[first:], held, layer.scaling
        )
        rows.append([math.fsum(given[:, key].tolist()) for key in range(len(held))])
    return head_mean(rows)


@dataclass(frozen=True)
class H2O(Scored):
    """Keeps tokens by the summed attention of all the prompt's queries."""

    def scores(self, layer: LayerView, head: int) -> list[float]:
        return group_attention(layer, head, None)


@dataclass(frozen=True)
class TOVA(Scored):
    """Keeps tokens by the attention of the last query."""

    window_size: int = 1

    def scores(self, layer: LayerView, head: int) -> list[float]:
        return group_attention(layer, head, 1)


@dataclass(frozen=True)
class KeyDiff(Scored):
    """Keeps keys that point away from the keys' mean direction."""

    def scores(self, layer: LayerView, head: int) -> list[float]:
        return two_minus_cosines(layer.entries[head])


@dataclass(frozen=True)
class RKV(Scored):
    """Keeps tokens by the last queries' attention against how similar their keys are to others."""

    kernel_size: int = 7
    importance: float = 0.1
    threshold: float = 0.5
    protect: int = field(default=0, kw_only=True)

    def scores(self, layer: LayerView, head: int) -> list[float]:
        return self.weighed(self.importances(layer, head), self.redundancy(layer.entries[head]))

    def exempt(self, positions: Sequence[int]) -> list[int]:
        return below(positions, self.protect)

    def scale(self, competed: Sequence[float]) -> float | None:
        return 1 / max(len(competed), 1)  # about the mean value of a softmax over all keys

    def choose(self, layer: LayerView) -> Choice:
        choice = super().choose(layer)
        if math.isinf(choice.margin):
            return choice
        return replace(choice, margin=min(choice.margin, *map(self.doubt, layer.entries)))

    def importances(self, layer: LayerView, head: int) -> list[float]:
        """Returns the pooled attention that each entry before the window receives."""
        group, held = len(layer.queries) // len(layer.entries), layer.entries[head]
        own = layer.queries[head * group : (head + 1) * group]
        before = max(len(held) - self.window_size, 0)
        if not before:
            return []
        weights = [0.0] * before
        count = min(self.window_size, len(own[0]))
        for row in range(-count, 0):
            logits = [
                max(float(queries[row] @ entry.key) for queries in own) * layer.scaling
                for entry in held[:before]
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

    def doubt(self, held: Sequence[Entry]) -> float:
        """Returns ten times the smallest gap between a deciding cosine and the threshold."""
        nearest = math.inf
        for row, likeness in enumerate(cosines(held)):
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


def norm(entry: Entry) -> float:
    """Returns the Euclidean norm of a key."""
    return math.sqrt(math.fsum(float(x) ** 2 for x in entry.key))


def two_minus_cosines(held: Sequence[Entry]) -> list[float]:
    """Returns, per entry, 2 minus the cosine between its key and the keys' mean direction."""
    directions = [entry.key.double() / norm(entry) for entry in held]
    mean = torch.stack(directions).mean(dim=0)
    length = math.sqrt(float(mean @ mean))
    return [2 - float(direction @ mean) / length for direction in directions]
