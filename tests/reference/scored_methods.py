"""Methods that keep the last tokens and, per KV head, those of highest score."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .attention import Entry, attention_probabilities
from .methods import Choice, LayerView
from .selection import budget, head_mean, margin, window_and_highest


@dataclass(frozen=True)
class Scored:
    """Base of methods that keep the last entries, those that are exempt and the highest scores."""

    retention_rate: float = 0.1
    window_size: int = 8

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
                self.retention_rate, None, seen=layer.seen, available=len(held), protected=always
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


def norm(entry: Entry) -> float:
    """Returns the Euclidean norm of a key."""
    return math.sqrt(math.fsum(float(x) ** 2 for x in entry.key))


def two_minus_cosines(held: Sequence[Entry]) -> list[float]:
    """Returns, per entry, 2 minus the cosine between its key and the keys' mean direction."""
    directions = [entry.key.double() / norm(entry) for entry in held]
    mean = torch.stack(directions).mean(dim=0)
    length = math.sqrt(float(mean @ mean))
    return [2 - float(direction @ mean) / length for direction in directions]
