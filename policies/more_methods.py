"""Further methods: one scorer each, under the selector that SnapKV has."""

from __future__ import annotations

from typing import ClassVar

from kvpolicy.budgets import DefaultRate
from kvpolicy.policies.key_scorers import KeyDiffScorer, KeyNormScorer, RandomScorer
from kvpolicy.policies.propagation import PassAllPropagation
from kvpolicy.policies.scorers import LastQueryScorer
from kvpolicy.policies.selectors import GQAGroupSelector
from kvpolicy.policy import CachePolicy


class TOVA(CachePolicy):
    """Keeps what the last token of the prompt attends to; prefill is complete.

    Args:
        retention_rate: Fraction of the context every layer keeps, in (0, 1].
        window_size: Last tokens that are always kept, at least 0.
        retention_tokens: Number of tokens every layer keeps, in place of the rate.
        protect: First tokens of the context that are always kept, at least 0.

    Raises:
        TypeError: An argument is not of its type.
        ValueError: An argument is out of its range, or both budgets are given.

    Example:
        >>> TOVA(retention_tokens=512).selector.budget
        Budget(rate=None, tokens=512)

    Source: Transformers are Multi-State RNNs (arXiv 2401.06104). The paper averages over all heads
    and evicts at every step; here the mean is over each KV group and the prompt is cut once.
    """

    paper: ClassVar[str] = "arXiv 2401.06104"

    def __init__(
        self,
        retention_rate: float | None = DefaultRate(0.1),
        window_size: int = 1,
        *,
        retention_tokens: int | None = None,
        protect: int = 0,
    ) -> None:
        super().__init__(
            LastQueryScorer(),
            GQAGroupSelector(retention_rate, window_size, retention_tokens, protect=protect),
            PassAllPropagation(),
        )


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
