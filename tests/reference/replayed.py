"""The queries just before a token, asked again from the position after the prompt."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from torch import Tensor

from .attention import Entry
from .droppers import CLAA
from .methods import LayerView, SnapKV
from .query_agnostic import turned


def replayed_peaks(
    queries: Sequence[Sequence[Tensor]],
    query_positions: Sequence[int],
    held: Sequence[Entry],
    *,
    scaling: float,
    theta: float,
    channels: slice = slice(None),
    reach: int = 4,
    sample_size: int = 512,
) -> list[float]:
    """Returns the largest attention that each entry gets, asked from after the row.

    The last entries are those of the queries: each is asked for by its own query and by the `reach`
    queries before it; entries that were held before, by all queries.
    """
    after = held[-1].position + 1
    older = len(held) - len(query_positions)
    found = [0.0] * len(held)
    for of_head in queries:
        for number, (query, position) in enumerate(zip(of_head, query_positions, strict=True)):
            asked = turned(turned(query, -position, theta, channels), after, theta, channels)
            asked = asked.double()

            def product(index: int, asked: Tensor = asked) -> float:
                return float(asked @ held[index].key.double()) * scaling

            total = sum(math.exp(product(index)) for index in range(min(4, len(held))))
            others = len(held) - 4
            if others > 0:
                parts = min(others, sample_size)
                middles = [int(Fraction(2 * part + 1, 2 * parts) * others) for part in range(parts)]
                total += sum(math.exp(product(4 + middle)) for middle in middles) * others / parts
            own = older + number
            for index in (*range(older), *range(own, min(own + reach + 1, len(held)))):
                given = min(math.exp(product(index)) / total, 1.0)
                found[index] = max(found[index], given)
    return found


@dataclass(frozen=True)
class Replay(SnapKV):
    """Keeps the entries of the largest replayed attention times the norm of the value."""

    window_size: int = 0

    def saliency(self, layer: LayerView) -> list[list[float]]:
        group = len(layer.queries) // len(layer.entries)
        found = []
        for head, held in enumerate(layer.entries):
            queries = layer.queries[head * group : (head + 1) * group]
            found += [self.of_group(layer, queries, held, [each.value for each in held])] * group
        return found

    def of_group(
        self,
        layer: LayerView,
        queries: Sequence[Tensor],
        held: Sequence[Entry],
        values: Sequence[Tensor],
    ) -> list[float]:
        """Returns the score of each entry outside the window, from the queries of one group."""
        assert layer.rope_theta is not None
        peaks = replayed_peaks(
            [list(rows) for rows in queries],
            layer.new_positions,
            held,
            scaling=layer.scaling,
            theta=layer.rope_theta,
            channels=layer.rope_channels,
        )
        found = [
            peak * float(value.double().norm()) for peak, value in zip(peaks, values, strict=True)
        ]
        return found[: max(len(held) - self.window_size, 0)]


@dataclass(frozen=True)
class DroppingReplay(Replay, CLAA):
    """A `Replay` that passes on, after one layer, what stands out in any head so far."""

    voting_layers: int = 1000
    whole_layers: int = 0
    spans: int = 7
