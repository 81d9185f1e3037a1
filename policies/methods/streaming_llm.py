"""StreamingLLM (arXiv 2309.17453)."""

from __future__ import annotations

from typing import ClassVar

from kvpolicy.budgets import DefaultRate
from kvpolicy.policies.propagation.pass_all import PassAllPropagation
from kvpolicy.policies.selectors.sink_and_recent import SinkAndRecentSelector
from kvpolicy.policy import CachePolicy


class StreamingLLM(CachePolicy):
    """Keeps the first ``num_sinks`` tokens and the most recent ones; prefill is complete.

    Args:
        retention_rate: Fraction of the context every layer keeps, in (0, 1].
        num_sinks: First tokens that are always kept.
        retention_tokens: Number of tokens every layer keeps, in place of the rate.
        protect: First tokens of the context that are always kept, at least 0.

    Raises:
        TypeError: An argument is not of its type.
        ValueError: An argument is out of its range, or both budgets are given.

    Example:
        >>> StreamingLLM(retention_tokens=2048).selector.num_sinks
        4

    Source: Efficient Streaming Language Models with Attention Sinks (arXiv 2309.17453). The paper
    evicts at every step and renumbers positions within the cache; here, as in FastKV's comparison,
    the prompt is cut once and tokens keep their positions.
    """

    paper: ClassVar[str] = "arXiv 2309.17453"

    def __init__(
        self,
        retention_rate: float | None = DefaultRate(0.1),
        num_sinks: int = 4,
        *,
        retention_tokens: int | None = None,
        protect: int = 0,
    ) -> None:
        super().__init__(
            None,
            SinkAndRecentSelector(retention_rate, num_sinks, retention_tokens, protect=protect),
            PassAllPropagation(),
        )
