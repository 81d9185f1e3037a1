"""The prompt's queries, asked again from the position after the prompt."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .attention import Entry, attention_probabilities
from .methods import FastKV, LayerView, SnapKV
from .query_agnostic import turned


def replayed_peaks(
    queries: Sequence[Sequence[Tensor]],
    query_positions: Sequence[int],
    held: Sequence[Entry],
    *,
    scaling: float,
    theta: float,
    channels: slice = slice(None),
) -> list[float]:
    """Returns the largest attention that a query of a group gives each entry from after the row.

    Args:
        queries: per query head of the group, the query of each new token.
        query_positions: positions of these tokens.
        held: the entries of the KV head; the last one is the row's last token.
        scaling: factor on the products.
        theta: base of the rotary frequencies.
        channels: which of a head's channels are rotated.
    """
    after = held[-1].position + 1
    found = [0.0] * len(held)
    for of_head in queries:
        for query, position in zip(of_head, query_positions, strict=True):
            asked = turned(turned(query, -position, theta, channels), after, theta, channels)
            given = attention_probabilities(asked[None].float(), [after], held, scaling)[0].tolist()
            found = [max(pair) for pair in zip(found, given, strict=True)]
    return found


@dataclass(frozen=True)
class Replay(SnapKV):
    """Keeps the entries of the largest replayed attention times the norm of the value."""

    window_size: int = 0

    def saliency(self, layer: LayerView) -> list[list[float]]:
        """Returns the scores per query head, the same for all heads of a group."""
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
class DroppingReplay(Replay, FastKV):
    """A `Replay` that passes on only the most salient new tokens after one layer."""
