"""Keeps tokens at random: the control of every comparison."""

import attrs

from kvpolicy.interfaces import Scorer
from kvpolicy.policies.documentation import documented
from kvpolicy.policies.methods.eviction import EvictionMethod
from kvpolicy.policies.scorers.random import RandomScorer


@documented
@attrs.frozen
class Random(EvictionMethod):
    """Keeps the last tokens, and others at random: the control of every comparison.

    Args:
        seed: Seed of the choice, at least 0.

    Example:
        >>> Random(retention_tokens=512).selector.budget
        Budget(rate=None, tokens=512)
    """

    seed: int = attrs.field(default=0, kw_only=True)

    def _scorer(self) -> Scorer:
        return RandomScorer(seed=self.seed)
