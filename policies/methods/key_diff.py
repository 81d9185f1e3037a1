"""KeyDiff (arXiv 2504.15364)."""

from __future__ import annotations

from typing import ClassVar

from kvpolicy.budgets import DefaultRate
from kvpolicy.policies.propagation.pass_all import PassAllPropagation
from kvpolicy.policies.scorers.keys import KeyDiffScorer
from kvpolicy.policies.selectors.gqa_group import GQAGroupSelector
from kvpolicy.policy import CachePolicy


class KeyDiff(CachePolicy):
    """Keeps the keys that resemble the others least; needs no query, prefill is complete.

    Args:
        retention_rate: Fraction of the context every layer keeps, in (0, 1].
        window_size: Last tokens that are always kept, at least 0.
        retention_tokens: Number of tokens every layer keeps, in place of the rate.
        protect: First tokens of the context that are always kept, at least 0.

    Raises:
        TypeError: An argument is not of its type.
        ValueError: An argument is out of its range, or both budgets are given.

    Example:
        >>> KeyDiff(retention_tokens=512).selector.budget
        Budget(rate=None, tokens=512)

    Source: KeyDiff: Key Similarity-Based KV Cache Eviction (arXiv 2504.15364). The paper evicts
    block by block while the prompt is read; here the prompt is cut once.
    """

    paper: ClassVar[str] = "arXiv 2504.15364"

    def __init__(
        self,
        retention_rate: float | None = DefaultRate(0.1),
        window_size: int = 8,
        *,
        retention_tokens: int | None = None,
        protect: int = 0,
    ) -> None:
        super().__init__(
            KeyDiffScorer(),
            GQAGroupSelector(retention_rate, window_size, retention_tokens, protect=protect),
            PassAllPropagation(),
        )
