"""Methods that look at keys before they are turned, and at what outputs values make."""

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .decoder import rotate
from .methods import LayerView
from .scored_methods import Scored


@dataclass(frozen=True)
class TurnedBack(Scored):
    """By the first channels of a key before it is turned, and a row's length on.

    Attributes:
        rope_theta: base of the rotary frequencies.
        channels: how many.
    """

    rope_theta: float = 10000.0
    channels: int = 2

    def scores(self, layer: LayerView, head: int) -> list[float]:
        """The sum of both lengths."""
        found = []
        for entry in layer.entries[head]:
            before = rotate(entry.key, -entry.position, self.rope_theta)
            ahead = rotate(before, entry.position + layer.seen, self.rope_theta)
            found.append(math.fsum(length(each[: self.channels]) for each in (before, ahead)))
        return found


@dataclass(frozen=True)
class Outputs(Scored):
    """By how far a value moves the output, the mean over query heads, times a part of its key.

    Attributes:
        weights: by layer, the output projection's, ``[hidden, query_heads * head_dim]``.
    """

    weights: tuple[Any, ...] = field(default=(), compare=False)

    def scores(self, layer: LayerView, head: int) -> list[float]:
        """The mean of the lengths."""
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
    """The root of the sum of squares."""
    return math.sqrt(math.fsum(value * value for value in vector.tolist()))
