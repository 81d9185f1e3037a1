"""H2O (arXiv 2306.14048)."""

from __future__ import annotations

from typing import ClassVar

from kvpolicy.budgets import DefaultRate
from kvpolicy.policies.propagation.pass_all import PassAllPropagation
from kvpolicy.policies.scorers.accumulated import AccumulatedAttentionScorer
from kvpolicy.policies.selectors.gqa_group import GQAGroupSelector
from kvpolicy.policy import CachePolicy


class H2O(CachePolicy):
    """Keeps the heavy hitters: what the prompt's tokens together attend to; prefill is complete.

    Every layer keeps the last tokens and, per KV head, those with the highest sum of the causal
    attention of all queries (see `AccumulatedAttentionScorer`), averaged over the KV group.

    Args:
        retention_rate: Fraction of the context every layer keeps, in (0, 1].
        window_size: Last tokens that are always kept, at least 0.
        retention_tokens: Number of tokens every layer keeps, in place of the rate.
        protect: First tokens of the context that are always kept, at least 0.

    Raises:
        TypeError: An argument is not of its type.
        ValueError: An argument is out of its range, or both budgets are given.

    Example:
        >>> H2O(retention_rate=0.2).num_queries is None
        True

    Source: H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models
    (arXiv 2306.14048). The paper evicts at every step, keeping as many recent tokens as heavy
    hitters; here, as in FastKV's comparison, the prompt is cut once and the window is small.
    """

    paper: ClassVar[str] = "arXiv 2306.14048"

    def __init__(
        self,
        retention_rate: float | None = DefaultRate(0.1),
        window_size: int = 8,
        *,
        retention_tokens: int | None = None,
        protect: int = 0,
    ) -> None:
        super().__init__(
            AccumulatedAttentionScorer(),
            GQAGroupSelector(retention_rate, window_size, retention_tokens, protect=protect),
            PassAllPropagation(),
        )
