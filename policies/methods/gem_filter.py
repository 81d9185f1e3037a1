"""GemFilter (arXiv 2409.17422)."""

from __future__ import annotations

from typing import ClassVar

from kvpolicy.budgets import DefaultRate
from kvpolicy.policies.propagation.restart import RestartPropagation
from kvpolicy.policies.scorers.last_query import LastQueryProductScorer
from kvpolicy.policies.selectors.keep_all import KeepAllSelector
from kvpolicy.policy import CachePolicy


class GemFilter(CachePolicy):
    """Chooses tokens at one layer by the last query, and starts again on those alone.

    Every layer keeps all tokens of the second pass. What the chosen tokens would have learnt from
    the others is lost to them, the price of a prefill that is as short as the cache.

    Args:
        filter_layer: Index of the layer that chooses, from 0; None for ``num_layers // 2 - 1``
            (the paper: 13 of 32).
        retention_rate: Fraction of the context that is chosen, in (0, 1].
        kernel_size: Width of the average-pooling, odd.
        retention_tokens: Number of tokens that are chosen, in place of the rate.
        protect: First tokens of the context that are always chosen.

    Raises:
        TypeError: An argument is not of its type.
        ValueError: An argument is out of its range, or both budgets are given.

    Example:
        >>> gem_filter = GemFilter(filter_layer=13, retention_rate=0.1)
        >>> round(gem_filter.prefill_compute_rate(num_layers=32), 2)
        0.51

    Source: Discovering the Gems in Early Layers: Accelerating Long-Context LLMs with 1000x Input
    Token Reduction (arXiv 2409.17422). Here the last prompt token is always among the chosen.
    """

    paper: ClassVar[str] = "arXiv 2409.17422"

    def __init__(
        self,
        filter_layer: int | None = None,
        retention_rate: float | None = DefaultRate(0.1),
        kernel_size: int = 5,
        *,
        retention_tokens: int | None = None,
        protect: int = 0,
    ) -> None:
        super().__init__(
            LastQueryProductScorer(kernel_size),
            KeepAllSelector(),
            RestartPropagation(filter_layer, retention_rate, retention_tokens, protect=protect),
        )
