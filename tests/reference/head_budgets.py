"""AdaKV: the KV heads of a layer share one budget by saliency."""

from collections.abc import Sequence
from dataclasses import dataclass

from .methods import Choice, LayerView, SnapKV
from .selection import budget, highest, margin


@dataclass(frozen=True)
class AdaKV(SnapKV):
    """Keeps the window, some entries of every KV head, and the best entries of all heads."""

    floor: float = 0.2

    def choose(self, layer: LayerView) -> Choice:
        scores = self.head_scores(layer)
        exempt = [self.exempt([entry.position for entry in held]) for held in layer.entries]
        # What each head always keeps: the protected entries, and the window, which has no scores.
        always = [
            guarded + list(range(len(row), len(held)))
            for held, row, guarded in zip(layer.entries, scores, exempt, strict=True)
        ]
        # A head may hold fewer entries than the window if another rule has chosen before.
        protected = max(map(len, always))
        count = budget(
            self.retention_rate,
            self.retention_tokens,
            seen=layer.seen,
            available=layer.seen,
            protected=protected,
        )
        chosen, gap = share(scores, exempt, count - protected, self.floor)
        kept = [sorted(own + taken) for own, taken in zip(always, chosen, strict=True)]
        return Choice(kept, margin=gap)


def share(
    scores: Sequence[Sequence[float]], exempt: Sequence[Sequence[int]], free: int, floor: float
) -> tuple[list[list[int]], float]:
    """Distributes `free` places per head: some to each head, the rest to the best of all heads.

    Also returns the smallest gap between a token taken and one dropped that could have been taken
    in its place: one of the same head, or in the ranking of all heads one of any head.
    """
    own_places = int(free * floor)
    taken: list[list[int]] = []
    rest: list[tuple[int, int]] = []
    for head, row in enumerate(scores):
        candidates = [index for index in range(len(row)) if index not in exempt[head]]
        best = highest([row[index] for index in candidates], own_places)
        taken.append([candidates[place] for place in best])
        rest += [(head, index) for index in candidates if index not in taken[head]]
    # `rest` is by head, then by token, which is how `highest` and so the method breaks ties.
    pooled = [scores[head][index] for head, index in rest]
    together = highest(pooled, len(scores) * (free - own_places))
    for place in together:
        head, index = rest[place]
        taken[head].append(index)
    gaps = [margin(row, taken[head], exempt[head]) for head, row in enumerate(scores)]
    return [sorted(indices) for indices in taken], min([margin(pooled, together), *gaps])
