"""CLAA (arXiv 2602.16054)."""

import attrs

from kvpolicy.budgets import DefaultRate
from kvpolicy.policies.documentation import documented
from kvpolicy.policies.methods.method import Method, Parts
from kvpolicy.policies.propagation.cross_layer import CrossLayerPropagation
from kvpolicy.policies.scorers.window import WindowMeanPoolScorer
from kvpolicy.policies.selectors.first_layers import FirstLayersWholeSelector
from kvpolicy.policies.selectors.gqa_group import GQAGroupSelector


@documented
@attrs.frozen
class CLAA(Method):
    """Drops most tokens half-way through prefill, by the attention of several layers.

    After layer ``tsp_layer`` only two kinds of tokens go on: the observation window, and the tokens
    to which the window gives the most attention at any KV head of the last ``voting_layers`` layers
    (see `CrossLayerPropagation`). The first ``whole_layers`` layers keep all keys and values, the
    others ``retention_rate`` of the whole context's, chosen as in `SnapKV` with average-pooling.

    Args:
        retention_rate: Fraction of the context that layers keep, and that goes on unless
            ``tsp_rate`` says otherwise, in (0, 1].
        tsp_layer: Index of the layer after which tokens are dropped, from 0; None for
            ``num_layers // 2 - 1``, which gives the paper's 15 for 32 layers.
        window_size: Tokens of the observation window, at least 1.
        kernel_size: Width of the average-pooling, odd.
        voting_layers: Layers up to ``tsp_layer`` that decide which tokens go on, at least 1.
        whole_layers: First layers that keep everything, at least 0.
        standardize: Whether the attention of each layer and KV head is standardized to mean 0 and
            deviation 1 before the maximum.
        tsp_rate: Fraction of the context that goes on, in (0, 1]; None for as much as is kept.
        tsp_tokens: Number of tokens that go on, at least 1, in place of the rate.
        retention_tokens: Number of tokens that layers keep, at least 1, in place of the rate.
        protect: First tokens of the context that are always kept and always go on, at least 0.

    Raises:
        TypeError: An argument is not of its type.
        ValueError: An argument is out of its range, both forms of a budget are given, or more is to
            be kept than goes on.

    Example:
        >>> CLAA(tsp_layer=15, retention_rate=0.2).prefill_compute_rate(num_layers=32)
        0.6

    Source: CLAA (arXiv 2602.16054): its public code from before the paper, with settings as
    described by others. Whether the paper standardizes is uncertain; the code has done both. By
    default the code keeps no layer whole. Sums over a KV group are means here, which does not
    change the order.
    """

    paper = "arXiv 2602.16054"

    retention_rate: float | None = DefaultRate(0.1)
    tsp_layer: int | None = attrs.field(default=None, kw_only=True)
    window_size: int = attrs.field(default=8, kw_only=True)
    kernel_size: int = attrs.field(default=7, kw_only=True)
    voting_layers: int = attrs.field(default=4, kw_only=True)
    whole_layers: int = attrs.field(default=4, kw_only=True)
    standardize: bool = attrs.field(default=True, kw_only=True)
    tsp_rate: float | None = attrs.field(default=None, kw_only=True)
    tsp_tokens: int | None = attrs.field(default=None, kw_only=True)
    retention_tokens: int | None = attrs.field(default=None, kw_only=True)
    protect: int = attrs.field(default=0, kw_only=True)

    def _parts(self) -> Parts:
        chosen = GQAGroupSelector(
            self.retention_rate,
            window_size=self.window_size,
            retention_tokens=self.retention_tokens,
            protect=self.protect,
        )
        given = self.tsp_rate is not None or self.tsp_tokens is not None
        propagation = CrossLayerPropagation(
            tsp_layer=self.tsp_layer,
            tsp_rate=self.tsp_rate if given else chosen.retention_rate,
            window_size=self.window_size,
            tsp_tokens=self.tsp_tokens if given else chosen.retention_tokens,
            protect=self.protect,
            voting_layers=self.voting_layers,
            standardize=self.standardize,
        )
        if chosen.budget.exceeds(propagation.budget):  # which the wrapped selector does not know
            raise ValueError(
                "retention_rate must not exceed tsp_rate, since layers after the drop cannot keep "
                f"more tokens than reach them, got {chosen.budget.amount} and "
                f"{propagation.budget.amount}"
            )
        scorer = WindowMeanPoolScorer(self.window_size, kernel_size=self.kernel_size)
        return scorer, FirstLayersWholeSelector(chosen, whole_layers=self.whole_layers), propagation
