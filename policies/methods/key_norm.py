"""Keys of small norm (arXiv 2406.11430)."""

from __future__ import annotations

from typing import ClassVar

from kvpolicy.budgets import DefaultRate
from kvpolicy.policies.propagation.pass_all import PassAllPropagation
from kvpolicy.policies.scorers.keys import KeyNormScorer
from kvpolicy.policies.selectors.gqa_group import GQAGroupSelector
from kvpolicy.policy import CachePolicy


class KeyNorm(CachePolicy):
    """Keeps the keys of smallest norm; needs no query, prefill is complete.

    Args:
        retention_rate: Fraction of the context every layer keeps, in (0, 1].
        window_size: Last tokens that are always kept, at least 0.
        retention_tokens: Number of tokens every layer keeps, in place of the rate.
        protect: First tokens of the context that are always kept, at least 0.

    Raises:
        TypeError: An argument is not of its type.
        ValueError: An argument is out of its range, or both budgets are given.

    Example:
        >>> KeyNorm(retention_tokens=512).selector.budget
        Budget(rate=None, tokens=512)

    Source: A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression
    (arXiv 2406.11430). The window is ours, as in the other methods, for the sake of comparison.
    """

    paper: ClassVar[str] = "arXiv 2406.11430"

    def __init__(
        self,
        retention_rate: float | None = DefaultRate(0.1),
        window_size: int = 8,
        *,
        retention_tokens: int | None = None,
        protect: int = 0,
    ) -> None:
        super().__init__(
            KeyNormScorer(),
            GQAGroupSelector(retention_rate, window_size, retention_tokens, protect=protect),
            PassAllPropagation(),
        )
