"""PyramidKV (arXiv 2406.02069)."""

from __future__ import annotations

from typing import ClassVar

from kvpolicy.budgets import DefaultRate
from kvpolicy.policies.propagation.pass_all import PassAllPropagation
from kvpolicy.policies.scorers.window import WindowMaxPoolScorer
from kvpolicy.policies.selectors.pyramid import PyramidSelector
from kvpolicy.policy import CachePolicy


class PyramidKV(CachePolicy):
    """Keeps what the last tokens of the prompt attend to, more of it in early layers than in late.

    SnapKV's saliency under budgets that fall with depth and have the same total (see
    `PyramidSelector`); prefill is complete.

    Args:
        retention_rate: Fraction of the context that layers keep on average, in (0, 1].
        window_size: Tokens of the observation window, at least 1.
        kernel_size: Width of the max-pooling, odd.
        beta: How steep the budgets fall, at least 1: the last layer keeps about ``1 / beta`` of
            the mean beside the window; 1 is no fall.
        retention_tokens: Number of tokens that layers keep on average, in place of the rate.
        protect: First tokens of the context that are always kept, at least 0.

    Raises:
        TypeError: An argument is not of its type.
        ValueError: An argument is out of its range, or both budgets are given.

    Example:
        >>> rates = PyramidKV(retention_rate=0.1, beta=2).selector.kept_rates(num_layers=3)
        >>> [round(rate, 3) for rate in rates]
        [0.15, 0.1, 0.05]

    Source: PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling
    (arXiv 2406.02069). Its code selects, and stores, per query head; this one per KV head.
    """

    paper: ClassVar[str] = "arXiv 2406.02069"

    def __init__(
        self,
        retention_rate: float | None = DefaultRate(0.1),
        window_size: int = 8,
        kernel_size: int = 7,
        beta: int = 20,
        *,
        retention_tokens: int | None = None,
        protect: int = 0,
    ) -> None:
        super().__init__(
            WindowMaxPoolScorer(window_size, kernel_size),
            PyramidSelector(retention_rate, window_size, retention_tokens, beta, protect=protect),
            PassAllPropagation(),
        )
