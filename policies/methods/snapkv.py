"""SnapKV (arXiv 2404.14469)."""

from __future__ import annotations

from typing import ClassVar

from kvpolicy.budgets import DefaultRate
from kvpolicy.policies.propagation.pass_all import PassAllPropagation
from kvpolicy.policies.scorers.window import WindowMaxPoolScorer
from kvpolicy.policies.selectors.gqa_group import GQAGroupSelector
from kvpolicy.policy import CachePolicy


class SnapKV(CachePolicy):
    """Keeps what the last tokens of the prompt attend to; prefill is complete.

    Every layer keeps the observation window and, per KV head, the tokens before it with the
    highest window saliency (see `WindowMaxPoolScorer`), averaged over the KV group.

    Args:
        retention_rate: Fraction of the context every layer keeps, in (0, 1].
        window_size: Tokens of the observation window, at least 1.
        kernel_size: Width of the max-pooling, odd.
        retention_tokens: Number of tokens every layer keeps, in place of the rate.
        protect: First tokens of the context that are always kept, at least 0.

    Raises:
        TypeError: An argument is not of its type.
        ValueError: An argument is out of its range, or both budgets are given.

    Example:
        >>> SnapKV(retention_rate=0.2).num_queries
        8

    Source: SnapKV: LLM Knows What You are Looking for Before Generation (arXiv 2404.14469).
    Its code selects, and stores, per query head; this one selects per KV head.
    """

    paper: ClassVar[str] = "arXiv 2404.14469"

    def __init__(
        self,
        retention_rate: float | None = DefaultRate(0.1),
        window_size: int = 8,
        kernel_size: int = 7,
        *,
        retention_tokens: int | None = None,
        protect: int = 0,
    ) -> None:
        super().__init__(
            WindowMaxPoolScorer(window_size, kernel_size),
            GQAGroupSelector(retention_rate, window_size, retention_tokens, protect=protect),
            PassAllPropagation(),
        )
