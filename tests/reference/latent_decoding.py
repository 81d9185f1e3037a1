"""Evicts latents while an answer is decoded, with one choice for all heads of a layer.

The product with a query is the same for a latent and its expanded key, so that rules that use only
products need no change. Rules that use the directions of keys score head by head, and the mean over
the heads decides.
"""

from dataclasses import asdict, dataclass, replace

from .decoding import HeadView, Redundancy, Rule, Unlike, Watched
from .indexed import IndexedState
from .latent import per_head
from .scored_methods import two_minus_cosines
from .selection import head_mean


class WatchedIndexedState(Watched, IndexedState):
    """The watched context of a DeepSeek V3.2 model; see `BoundedState.kind`."""


@dataclass(frozen=True)
class LatentUnlike(Unlike):
    """The rule of KeyDiff on the expanded keys."""

    def scores(self, head: HeadView) -> list[float]:
        return head_mean([two_minus_cosines(held) for held in per_head(head.entries)])


@dataclass(frozen=True)
class LatentRedundancy(Redundancy):
    """The rule of R-KV on the expanded keys, with each head as its own group."""

    def scores(self, head: HeadView) -> list[float]:
        found = []
        for queries, held in zip(head.queries, per_head(head.entries), strict=True):
            importances = self.importances(replace(head, queries=[queries]))
            found.append(self.weighed(importances, self.redundancy(held)))
        return head_mean(found)


def of_latents(rule: Rule) -> Rule:
    """Returns a rule's variant for layers whose heads share latents."""
    if isinstance(rule, Unlike):
        return LatentUnlike(**asdict(rule))
    if isinstance(rule, Redundancy):
        return LatentRedundancy(**asdict(rule))
    return rule
