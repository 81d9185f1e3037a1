"""Methods that keep the last tokens and, per KV head, those of highest score."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .attention import Entry, attention_probabilities
from .methods import Choice, LayerView
from .selection import budget, head_mean, highest, margin


@dataclass(frozen=True)
class Scored:
    """Base of methods that keep the last `window_size` entries and the highest other scores."""

    retention_rate: float = 0.1
    window_size: int = 8

    def scores(self, layer: LayerView, head: int) -> list[float]:
        """Returns a positive score for each entry of a KV head; the highest are kept."""
        raise NotImplementedError

    def choose(self, layer: LayerView) -> Choice:
        kept, margins = [], []
        for head, held in enumerate(layer.entries):
            count = budget(
                self.retention_rate,
                None,
                seen=layer.seen,
                available=len(held),
                protected=self.window_size,
            )
            outside = max(len(held) - self.window_size, 0)
            scores = self.scores(layer, head)[:outside]
            chosen = highest(scores, count - (len(held) - outside))
            kept.append(chosen + list(range(outside, len(held))))
            margins.append(margin(scores, chosen))
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
