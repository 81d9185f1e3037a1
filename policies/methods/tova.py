"""TOVA (arXiv 2401.06104)."""

from __future__ import annotations

from typing import ClassVar

from kvpolicy.budgets import DefaultRate
from kvpolicy.policies.propagation.pass_all import PassAllPropagation
from kvpolicy.policies.scorers.last_query import LastQueryScorer
from kvpolicy.policies.selectors.gqa_group import GQAGroupSelector
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
