"""Methods that score entries by unrotated keys, or by projected values."""

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .decoder import rotate
from .methods import LayerView
from .scored_methods import Scored


@dataclass(frozen=True)
class TurnedBack(Scored):
    """Scores a key by the norms of its first channels, unrotated and turned to later places."""

    rope_theta: float = 10000.0
    channels: int = 2

    def scores(self, layer: LayerView, head: int) -> list[float]:
        found = []
        for entry in layer.entries[head]:
            before = rotate(entry.key, -entry.position, self.rope_theta)
            ahead = rotate(before, entry.position + layer.seen, self.rope_theta)
            found.append(math.fsum(length(each[: self.channels]) for each in (before, ahead)))
        return found


@dataclass(frozen=True)
class Outputs(Scored):
    """Scores a token by the norm of its value's projected output times a part of its key."""

    weights: tuple[Any, ...] = field(default=(), compare=False)

    def scores(self, layer: LayerView, head: int) -> list[float]:
        group, weight = len(layer.queries) // len(layer.entries), self.weights[layer.layer_idx]
        found = []
        for entry in layer.entries[head]:
            width = len(entry.value)
            moved = [
                length(weight[:, query * width : (query + 1) * width] @ entry.value)
                for query in range(head * group, (head + 1) * group)
            ]
            found.append(length(entry.key[:2]) * math.fsum(moved) / group)
        return found


def length(vector: Tensor) -> float:
    """Returns the Euclidean norm of a vector."""
    return math.sqrt(math.fsum(value * value for value in vector.tolist()))
