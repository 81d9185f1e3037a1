"""FastKV (arXiv 2502.01068)."""

import attrs

from kvpolicy.budgets import DefaultRate
from kvpolicy.policies.documentation import documented
from kvpolicy.policies.methods.method import Method, Parts
from kvpolicy.policies.propagation.token_selective import TokenSelectivePropagation
from kvpolicy.policies.scorers.window import WindowMaxPoolScorer
from kvpolicy.policies.selectors.gqa_group import GQAGroupSelector


@documented
@attrs.frozen
class FastKV(Method):
    """Drops most tokens half-way through prefill, and keeps few keys and values at every layer.

    After layer ``tsp_layer`` only ``tsp_rate`` of the tokens go on: the observation window and the
    tokens with the highest window saliency, averaged over all query heads. Every layer, before
    and after, keeps ``retention_rate`` of the whole context's keys and values, chosen as by
    `SnapKV`. The saliency of the TSP layer is computed once for both.

    Args:
        retention_rate: Fraction of the context every layer keeps, in (0, 1], at most ``tsp_rate``.
        tsp_layer: Index of the layer after which tokens are dropped, from 0; None for
            ``num_layers // 2 - 1``, which gives the paper's 15, 17 and 19 for 32, 36 and 40 layers.
        tsp_rate: Fraction of the context that goes on, in (0, 1].
        window_size: Tokens of the observation window, at least 1.
        tsp_tokens: Number of tokens that go on, at least 1, in place of the rate.
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

    paper = "arXiv 2502.01068"

    retention_rate: float | None = DefaultRate(0.1)
    tsp_layer: int | None = attrs.field(default=None, kw_only=True)
    tsp_rate: float | None = attrs.field(default=DefaultRate(0.2), kw_only=True)
    window_size: int = attrs.field(default=8, kw_only=True)
    kernel_size: int = attrs.field(default=7, kw_only=True)
    tsp_tokens: int | None = attrs.field(default=None, kw_only=True)
    retention_tokens: int | None = attrs.field(default=None, kw_only=True)
    protect: int = attrs.field(default=0, kw_only=True)

    def _parts(self) -> Parts:
        scorer = WindowMaxPoolScorer(self.window_size, kernel_size=self.kernel_size)
        selector = GQAGroupSelector(
            self.retention_rate,
            window_size=self.window_size,
            retention_tokens=self.retention_tokens,
            protect=self.protect,
        )
        propagation = TokenSelectivePropagation(
            tsp_layer=self.tsp_layer,
            tsp_rate=self.tsp_rate,
            window_size=self.window_size,
            tsp_tokens=self.tsp_tokens,
            protect=self.protect,
        )
        return scorer, selector, propagation
