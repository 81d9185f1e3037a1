"""Ada-KV (arXiv 2407.11550)."""

from __future__ import annotations

from typing import ClassVar

from kvpolicy.budgets import DefaultRate
from kvpolicy.policies.propagation.pass_all import PassAllPropagation
from kvpolicy.policies.scorers.window import WindowMaxPoolScorer
from kvpolicy.policies.selectors.adaptive_head import AdaptiveHeadSelector
from kvpolicy.policy import CachePolicy


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
