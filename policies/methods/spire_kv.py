"""SpireKV: FastKV with the parts that this project's study found best."""

import attrs

from kvpolicy.budgets import DefaultRate
from kvpolicy.policies.documentation import documented
from kvpolicy.policies.methods.method import Method, Parts
from kvpolicy.policies.propagation.token_selective import TokenSelectivePropagation
from kvpolicy.policies.scorers.window import WindowMaxPoolScorer
from kvpolicy.policies.selectors.pyramid import PyramidSelector

# The smallest fraction of the context that goes on to later layers, if tsp_rate is not given.
LEAST_PASSED = 0.1


@documented
@attrs.frozen
class SpireKV(Method):
    """FastKV with half the window, half the tokens passed on, and budgets that fall with depth.

    After layer ``tsp_layer`` only the observation window and the tokens with the highest window
    saliency, averaged over all query heads, go on, as in `FastKV`. Every layer keeps keys and
    values by the same saliency, lower layers more and upper layers fewer, as in `PyramidKV`, but
    each at least ``kernel_size // 2 + 1`` beside the window where the budget allows it. Of the
    tokens that the max-pooling makes equal, the one that is attended to comes first, then those
    after it (``peak_first`` of `WindowMaxPoolScorer`): few places hold the beginning of an answer.
    This is not a published method: of the compositions in this project's own study
    it answered most questions on small trained models at its cost.

    Args:
        retention_rate: Fraction of the context that layers keep on average, in (0, 1].
        tsp_layer: Index of the layer after which tokens are dropped, from 0; None for
            ``num_layers // 2 - 1``.
        window_size: Tokens of the observation window, at least 1.
        beta: How steep the budgets fall, at least 1; see `PyramidSelector`.
        tsp_rate: Fraction of the context that goes on, in (0, 1], at least the retention; None for
            0.1, or as much as is kept where that is more.
        tsp_tokens: Number of tokens that go on, at least 1, in place of the rate.
        retention_tokens: Number of tokens that layers keep on average, at least 1, in place of the
            rate; as many go on where nothing else is said.
        protect: First tokens of the context that are always kept and always go on, at least 0.

    Raises:
        TypeError: An argument is not of its type.
        ValueError: An argument is out of its range, both forms of a budget are given, or the
            retention exceeds the tokens that go on.

    Example:
        >>> SpireKV(tsp_layer=15).prefill_compute_rate(num_layers=32)
        0.55
    """

    retention_rate: float | None = DefaultRate(0.1)
    tsp_layer: int | None = attrs.field(default=None, kw_only=True)
    window_size: int = attrs.field(default=4, kw_only=True)
    kernel_size: int = attrs.field(default=7, kw_only=True)
    beta: int = attrs.field(default=20, kw_only=True)
    tsp_rate: float | None = attrs.field(default=None, kw_only=True)
    tsp_tokens: int | None = attrs.field(default=None, kw_only=True)
    retention_tokens: int | None = attrs.field(default=None, kw_only=True)
    protect: int = attrs.field(default=0, kw_only=True)

    def _parts(self) -> Parts:
        scorer = WindowMaxPoolScorer(
            self.window_size, kernel_size=self.kernel_size, peak_first=True
        )
        selector = PyramidSelector(
            self.retention_rate,
            window_size=self.window_size,
            retention_tokens=self.retention_tokens,
            beta=self.beta,
            protect=self.protect,
            floor_tokens=self.kernel_size // 2 + 1,
        )
        kept, rate, tokens = selector.mean_budget, self.tsp_rate, self.tsp_tokens
        if rate is None and tokens is None:
            rate = None if kept.rate is None else max(LEAST_PASSED, kept.rate)
            tokens = kept.tokens
        propagation = TokenSelectivePropagation(
            tsp_layer=self.tsp_layer,
            tsp_rate=rate,
            window_size=self.window_size,
            tsp_tokens=tokens,
            protect=self.protect,
        )
        if kept.exceeds(propagation.budget):  # the policy compares no budgets that differ by layer
            raise ValueError(
                "retention_rate must not exceed tsp_rate, since layers after the drop cannot keep "
                f"more tokens than reach them, got {kept.amount} and {propagation.budget.amount}"
            )
        return scorer, selector, propagation
