"""Eviction while an answer is decoded, of latents: one choice for all heads of a layer.

Products with queries are the same for a latent and for what it expands to, so that rules that go by
these alone need nothing else. What goes by the directions of keys does so head by head, and the
mean over the heads counts.
"""

from dataclasses import asdict, dataclass, replace

from .decoding import HeadView, Redundancy, Rule, Unlike, Watched
from .indexed import IndexedState
from .latent import LatentState, per_head
from .scored_methods import two_minus_cosines
from .selection import head_mean


class WatchedLatentState(Watched, LatentState):
    """A context in a model of the DeepSeek V3 family; see `BoundedState.kind`."""


class WatchedIndexedState(Watched, IndexedState):
    """A context in a model of the DeepSeek V3.2 family; see `BoundedState.kind`."""


@dataclass(frozen=True)
class LatentUnlike(Unlike):
    """KeyDiff by the expanded keys."""

    def scores(self, head: HeadView) -> list[float]:
        """The mean over the heads of two minus the cosine."""
        return head_mean([two_minus_cosines(held) for held in per_head(head.entries)])


@dataclass(frozen=True)
class LatentRedundancy(Redundancy):
    """R-KV by the expanded keys, each head a group of its own."""

    def scores(self, head: HeadView) -> list[float]:
        """The mean over the heads."""
        found = []
        for queries, held in zip(head.queries, per_head(head.entries), strict=True):
            importances = self.importances(replace(head, queries=[queries]))
            found.append(self.weighed(importances, self.redundancy(held)))
        return head_mean(found)


def of_latents(rule: Rule) -> Rule:
    """A rule as it is where heads share latents."""
    if isinstance(rule, Unlike):
        return LatentUnlike(**asdict(rule))
    if isinstance(rule, Redundancy):
        return LatentRedundancy(**asdict(rule))
    return rule
