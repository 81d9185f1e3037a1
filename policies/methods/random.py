"""The control of every comparison."""

from __future__ import annotations

from kvpolicy.budgets import DefaultRate
from kvpolicy.policies.propagation.pass_all import PassAllPropagation
from kvpolicy.policies.scorers.random import RandomScorer
from kvpolicy.policies.selectors.gqa_group import GQAGroupSelector
from kvpolicy.policy import CachePolicy


class Random(CachePolicy):
    """Keeps tokens at random, beside the last ones: the control; prefill is complete.

    Args:
        retention_rate: Fraction of the context every layer keeps, in (0, 1].
        window_size: Last tokens that are always kept, at least 0.
        seed: Of the choice, at least 0.
        retention_tokens: Number of tokens every layer keeps, in place of the rate.
        protect: First tokens of the context that are always kept, at least 0.

    Raises:
        TypeError: An argument is not of its type.
        ValueError: An argument is out of its range, or both budgets are given.

    Example:
        >>> Random(retention_tokens=512).selector.budget
        Budget(rate=None, tokens=512)
    """

    def __init__(
        self,
        retention_rate: float | None = DefaultRate(0.1),
        window_size: int = 8,
        seed: int = 0,
        *,
        retention_tokens: int | None = None,
        protect: int = 0,
    ) -> None:
        super().__init__(
            RandomScorer(seed),
            GQAGroupSelector(retention_rate, window_size, retention_tokens, protect=protect),
            PassAllPropagation(),
        )
