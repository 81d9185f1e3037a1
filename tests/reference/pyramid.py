"""PyramidInfer: every layer keeps all its entries and passes on fewer tokens."""

import math
from dataclasses import dataclass

from .attention import attention_probabilities
from .methods import Choice, LayerView
from .selection import highest, margin


@dataclass(frozen=True)
class PyramidInfer:
    """Passes on the tail, the sinks and the best of the other tokens."""

    recent_rate: float = 0.2
    decay_ratio: float = 0.7
    distance_weight: float = 1.2
    num_sinks: int = 4
    min_context: int = 64

    def choose(self, layer: LayerView) -> Choice:
        kept = [list(range(len(held))) for held in layer.entries]
        if layer.layer_idx == layer.num_layers - 1:
            return Choice(kept)
        new_len = len(layer.new_positions)
        recent = int(layer.seen * self.recent_rate)
        rest = max(new_len - 1 - recent, 0)
        ratio = (1 - self.decay_ratio) * (
            math.cos(math.pi * layer.layer_idx / layer.num_layers) + 1
        ) / 2 + self.decay_ratio
        stay = int(rest * ratio)
        if stay <= min(self.min_context, layer.seen - 1 - recent) or ratio >= 1:
            return Choice(kept)
        sinks = [i for i in range(rest) if layer.new_positions[i] < self.num_sinks]
        others = [i for i in range(rest) if i not in sinks]
        scores = self.weights(layer, rest)
        chosen = highest([scores[i] for i in others], max(stay - len(sinks), 0))
        passed = sorted(sinks + [others[i] for i in chosen]) + list(range(rest, new_len))
        return Choice(kept, passed, margin([scores[i] for i in others], chosen))

    def weights(self, layer: LayerView, rest: int) -> list[float]:
        """Returns the tail queries' weighted mean attention to each token before the tail."""
        new_len = len(layer.new_positions)
        tail = new_len - rest
        step = (self.distance_weight - 1) / (tail - 1) if tail > 1 else 0.0
        group = len(layer.queries) // len(layer.entries)
        totals = [0.0] * rest
        for head, queries in enumerate(layer.queries):
            held = layer.entries[head // group]
            given = attention_probabilities(
                queries[rest:], layer.new_positions[rest:], held, layer.scaling
            )
            first_new = len(held) - new_len
            for key in range(rest):
                column = given[:, first_new + key].tolist()
                totals[key] += math.fsum(
                    weight * (1 + step * index) for index, weight in enumerate(column)
                ) / (tail * len(layer.queries))
        return totals
