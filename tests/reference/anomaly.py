"""NestedKV: keys against the mean of all keys, of their block and of the last ones."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .attention import Entry
from .head_budgets import AdaKV
from .methods import LayerView


def unit(vector: Sequence[float]) -> list[float]:
    """Returns a vector divided by its length."""
    length = math.sqrt(math.fsum(x * x for x in vector))
    return [x / length for x in vector]


def unlikeness(own: Sequence[float], others: Sequence[Sequence[float]]) -> float:
    """Returns minus the cosine of a direction with the mean of others."""
    mean = [
        math.fsum(each[channel] for each in others) / len(others) for channel in range(len(own))
    ]
    return -math.fsum(x * y for x, y in zip(own, unit(mean), strict=True))


def between_zero_and_one(numbers: Sequence[float]) -> list[float]:
    """Maps the lowest number to 0 and the highest to 1; all to 0 if they differ by rounding."""
    low, high = min(numbers), max(numbers)
    return [(x - low) / (high - low) if high - low > 1e-5 else 0.0 for x in numbers]


def importance(prior: float, scaled: Sequence[float]) -> float:
    """Returns how much one of the means counts in a head, before it is divided by the sum."""
    ordered = sorted(scaled)
    tenth = max(len(ordered) // 10, 1)
    gap = statistics.fmean(ordered[-tenth:]) - statistics.fmean(ordered[:tenth])
    return prior * math.exp(3 * gap)


def anomaly_scores(keys: Sequence[Tensor], local_size: int, block_size: int | None) -> list[float]:
    """Returns the score of each key that a head holds."""
    count = len(keys)
    size = block_size or min(max(count // 32, 128), 256)
    directions = [unit(key.double().tolist()) for key in keys]
    seen: tuple[list[float], list[float], list[float]] = [], [], []
    for i, own in enumerate(directions):
        block = i // size * size
        seen[0].append(unlikeness(own, directions))
        seen[1].append(unlikeness(own, directions[block : block + size]))
        seen[2].append(unlikeness(own, directions[max(i - local_size + 1, 0) : i + 1]))
    scaled = [between_zero_and_one(each) for each in seen]
    weights = [importance(*pair) for pair in zip((0.4, 0.4, 0.2), scaled, strict=True)]
    triples = list(zip(*scaled, strict=True))
    apart = between_zero_and_one([statistics.pstdev(triple) for triple in triples])
    mean = statistics.fmean(apart)
    found = []
    for triple, surprise in zip(triples, apart, strict=True):
        together = math.fsum(w * a for w, a in zip(weights, triple, strict=True)) / sum(weights)
        share = 1 / (1 + math.exp(-10 * (surprise - mean - 0.6)))
        found.append((1 - share) * together + share * max(triple))
    return found


@dataclass(frozen=True)
class NestedKV(AdaKV):
    """Keeps the most anomalous keys; the heads share a budget as in `AdaKV`."""

    window_size: int = 0
    protect: int = 4
    local_size: int = 64
    block_size: int | None = None

    def head_scores(self, layer: LayerView) -> list[list[float]]:
        return [
            self.of_entries(held)[: max(len(held) - self.window_size, 0)] for held in layer.entries
        ]

    def of_entries(self, held: Sequence[Entry]) -> list[float]:
        return anomaly_scores([each.key for each in held], self.local_size, self.block_size)
