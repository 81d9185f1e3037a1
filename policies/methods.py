"""The methods of the literature, as compositions of parts."""

from __future__ import annotations

from typing import ClassVar

from kvpolicy.budgets import DefaultRate
from kvpolicy.policies.propagation import PassAllPropagation, TokenSelectivePropagation
from kvpolicy.policies.scorers import AccumulatedAttentionScorer, WindowMaxPoolScorer
from kvpolicy.policies.selectors import GQAGroupSelector, KeepAllSelector, SinkAndRecentSelector
from kvpolicy.policy import CachePolicy


class FullContext(CachePolicy):
    """Keeps everything and drops nothing: the baseline of every comparison.

    Example:
        >>> FullContext().prefill_compute_rate(num_layers=32)
        1.0
    """

    def __init__(self) -> None:
        super().__init__(None, KeepAllSelector(), PassAllPropagation())


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


class FastKV(CachePolicy):
    """Drops most tokens half-way through prefill, and keeps few keys and values at every layer.

    After layer ``tsp_layer`` only ``tsp_rate`` of the tokens go on: the observation window and the
    tokens with the highest window saliency, averaged over all query heads. Every layer, before
    and after, keeps ``retention_rate`` of the whole context's keys and values, chosen as by
    `SnapKV`. The saliency of the TSP layer is computed once for both.

    Args:
        tsp_layer: Index of the layer after which tokens are dropped, from 0; None for
            ``num_layers // 2 - 1``, which gives the paper's 15, 17 and 19 for 32, 36 and 40 layers.
        tsp_rate: Fraction of the context that goes on, in (0, 1].
        retention_rate: Fraction of the context every layer keeps, in (0, 1], at most ``tsp_rate``.
        window_size: Tokens of the observation window, at least 1.
        kernel_size: Width of the max-pooling, odd.
        tsp_tokens: Number of tokens that go on, in place of the rate.
        retention_tokens: Number of tokens every layer keeps, in place of the rate.
        protect: First tokens of the context that are always kept and always go on, at least 0.

    Raises:
        TypeError: An argument is not of its type.
        ValueError: An argument is out of its range, both forms of a budget are given, or the
            retention exceeds the TSP budget.

    Example:
        >>> FastKV(tsp_layer=15, tsp_rate=0.2).prefill_compute_rate(num_layers=32)
        0.6

    Source: FastKV: Decoupling of Context Reduction and KV Cache Compression for Prefill-Decoding
    Acceleration (arXiv 2502.01068).
    """

    paper: ClassVar[str] = "arXiv 2502.01068"

    def __init__(
        self,
        tsp_layer: int | None = None,
        tsp_rate: float | None = DefaultRate(0.2),
        retention_rate: float | None = DefaultRate(0.1),
        window_size: int = 8,
        kernel_size: int = 7,
        *,
        tsp_tokens: int | None = None,
        retention_tokens: int | None = None,
        protect: int = 0,
    ) -> None:
        super().__init__(
            WindowMaxPoolScorer(window_size, kernel_size),
            GQAGroupSelector(retention_rate, window_size, retention_tokens, protect=protect),
            TokenSelectivePropagation(
                tsp_layer, tsp_rate, window_size, tsp_tokens, protect=protect
            ),
        )
