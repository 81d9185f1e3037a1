"""Methods that compare runs of neighbouring tokens: LagKV and ChunkKV."""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from .attention import Entry
from .methods import LayerView, SnapKV
from .scored_methods import Scored


def lag_scores(
    positions: Sequence[int],
    keys: Sequence[Sequence[float]],
    values: Sequence[Sequence[float]],
    *,
    num_sinks: int,
    lag_size: int,
) -> list[float]:
    """Returns each token's score: 2 for a sink, else its rank in its run or its recency."""
    sinks = sum(position < num_sinks for position in positions)
    behind = range(sinks, len(positions))
    starts = range(sinks, len(positions) - lag_size + 1, lag_size)
    found = dict.fromkeys(range(sinks), 2.0)
    for run, following in itertools.pairwise(range(at, at + lag_size) for at in starts):
        total = dict.fromkeys(run, 0.0)
        for states in (keys, values):
            deviations = unevenness([states[j] for j in run], [states[j] for j in following])
            norm = math.fsum(map(math.exp, deviations))
            for j, deviation in zip(run, deviations, strict=True):
                total[j] += math.exp(deviation) / norm
        for rank, j in enumerate(sorted(run, key=total.__getitem__)):
            found[j] = rank / lag_size
    rest = [j for j in behind if j not in found]
    found |= {j: 1 + place / len(rest) for place, j in enumerate(rest)}
    return [found[j] for j in range(len(positions))]


def unevenness(run: Sequence[Sequence[float]], following: Sequence[Sequence[float]]) -> list[float]:
    """Returns each token's deviation over its channels, scaled to the range of the next run."""
    spans = [(min(channel), max(channel)) for channel in zip(*following, strict=True)]
    return [
        statistics.stdev(
            (x - low) / (high - low) if low < high else 0.0
            for x, (low, high) in zip(state, spans, strict=True)
        )
        for state in run
    ]


@dataclass(frozen=True)
class LagKV(Scored):
    """Keeps the tokens that differ most from the run after their own."""

    num_sinks: int = 4
    lag_size: int = 128

    def scores(self, layer: LayerView, head: int) -> list[float]:
        return self.of_entries(layer.entries[head])

    def of_entries(self, held: Sequence[Entry]) -> list[float]:
        return lag_scores(
            [entry.position for entry in held],
            [entry.key.tolist() for entry in held],
            [entry.value.tolist() for entry in held],
            num_sinks=self.num_sinks,
            lag_size=self.lag_size,
        )


@dataclass(frozen=True)
class ChunkKV(SnapKV):
    """A SnapKV that scores chunks by the mean over their tokens and all heads."""

    chunk_length: int = 10

    def head_scores(self, layer: LayerView) -> list[list[float]]:
        saliency = self.saliency(layer)
        group = len(layer.queries) // len(layer.entries)
        chunks = [[entry.position // self.chunk_length for entry in held] for held in layer.entries]
        of_chunk: dict[int, list[float]] = defaultdict(list)
        for head, scores in enumerate(saliency):
            for chunk, score in zip(chunks[head // group], scores, strict=False):
                of_chunk[chunk].append(score)
        means = {chunk: math.fsum(each) / len(each) for chunk, each in of_chunk.items()}
        before = len(saliency[0])
        return [[means[chunk] for chunk in held[:before]] for held in chunks]
