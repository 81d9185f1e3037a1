"""Methods that keep SnapKV's tokens, with budgets that layers or heads share."""

from __future__ import annotations

from typing import ClassVar

from kvpolicy.budgets import DefaultRate
from kvpolicy.policies.layer_budgets import AdaptiveHeadSelector, PyramidSelector
from kvpolicy.policies.propagation import PassAllPropagation
from kvpolicy.policies.scorers import WindowMaxPoolScorer
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


class AdaKV(CachePolicy):
    """Keeps what the last tokens of the prompt attend to; the KV heads of a layer share its budget.

    SnapKV's saliency, ranked over all heads of a layer beside a floor that every head has for
    itself (see `AdaptiveHeadSelector`); prefill is complete.

    Args:
        retention_rate: Fraction of the context that heads keep on average, in (0, 1].
        window_size: Tokens of the observation window, at least 1.
        kernel_size: Width of the max-pooling, odd.
        floor: Share of the places beside the window that every head fills by itself, in [0, 1]; 1
            is SnapKV.
        retention_tokens: Number of tokens that heads keep on average, in place of the rate.
        protect: First tokens of the context that are always kept, at least 0.

    Raises:
        TypeError: An argument is not of its type.
        ValueError: An argument is out of its range, or both budgets are given.

    Example:
        >>> AdaKV(retention_tokens=512, floor=0.5).selector.floor
        0.5

    Source: Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM
    Inference (arXiv 2407.11550).
    """

    paper: ClassVar[str] = "arXiv 2407.11550"

    def __init__(
        self,
        retention_rate: float | None = DefaultRate(0.1),
        window_size: int = 8,
        kernel_size: int = 7,
        floor: float = 0.2,
        *,
        retention_tokens: int | None = None,
        protect: int = 0,
    ) -> None:
        super().__init__(
            WindowMaxPoolScorer(window_size, kernel_size),
            AdaptiveHeadSelector(
                retention_rate, window_size, retention_tokens, floor, protect=protect
            ),
            PassAllPropagation(),
        )
