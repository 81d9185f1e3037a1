"""PyramidInfer (arXiv 2405.12532)."""

from __future__ import annotations

from typing import ClassVar

from kvpolicy.policies.propagation.pyramid import PyramidPropagation
from kvpolicy.policies.scorers.weighted_tail import WeightedTailScorer
from kvpolicy.policies.selectors.keep_all import KeepAllSelector
from kvpolicy.policy import CachePolicy


class PyramidInfer(CachePolicy):
    """Drops a little of the context after every layer; layers keep all that reaches them.

    Args:
        recent_rate: Fraction of the context that makes the tail: it observes, and always stays.
        decay_ratio: How much of the context before the tail goes on after the last layers; after
            the first nearly all does.
        distance_weight: Weight of the last observing query against the first.
        num_sinks: First tokens that always stay.
        min_context: Tokens before the tail below which nothing is dropped.

    Raises:
        TypeError: An argument is not of its type.
        ValueError: An argument is out of its range.

    Example:
        >>> round(PyramidInfer(decay_ratio=0.75).prefill_compute_rate(num_layers=36), 2)
        0.6

    Source: PyramidInfer: Pyramid KV Cache Compression for High-throughput LLM Inference
    (arXiv 2405.12532), with the settings of FastKV's comparison.
    """

    paper: ClassVar[str] = "arXiv 2405.12532"

    def __init__(
        self,
        recent_rate: float = 0.2,
        decay_ratio: float = 0.7,
        distance_weight: float = 1.2,
        num_sinks: int = 4,
        min_context: int = 64,
    ) -> None:
        super().__init__(
            WeightedTailScorer(recent_rate, distance_weight),
            KeepAllSelector(),
            PyramidPropagation(recent_rate, decay_ratio, num_sinks, min_context),
        )
