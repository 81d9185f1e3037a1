"""GemFilter (arXiv 2409.17422)."""

import attrs

from kvpolicy.budgets import DefaultRate
from kvpolicy.policies.documentation import documented
from kvpolicy.policies.methods.method import Method, Parts
from kvpolicy.policies.propagation.restart import RestartPropagation
from kvpolicy.policies.scorers.last_query import LastQueryProductScorer
from kvpolicy.policies.selectors.keep_all import KeepAllSelector


@documented
@attrs.frozen
class GemFilter(Method):
    """Chooses tokens at one layer by the last query, and restarts the prefill on these alone.

    Every layer keeps all tokens of the second pass. In that pass the chosen tokens do not attend to
    the others, the price of a prefill that is as short as the cache.

    Args:
        retention_rate: Fraction of the context that is chosen, in (0, 1].
        filter_layer: Index of the layer that chooses, from 0; None for ``num_layers // 2 - 1``
            (the paper: 13 of 32). Not a ``tsp_layer``: the prefill restarts at the first layer.
        kernel_size: Width of the average-pooling, odd.
        decoding: A `DecodingEviction`, by which every layer stays bounded while an answer is
            decoded; None lets it grow.
        retention_tokens: Number of tokens that are chosen, at least 1, in place of the rate.
        protect: First tokens of the context that are always chosen, at least 0.

    Example:
        >>> gem_filter = GemFilter(filter_layer=13, retention_rate=0.1)
        >>> round(gem_filter.prefill_compute_rate(num_layers=32), 2)
        0.51

    Source: Discovering the Gems in Early Layers: Accelerating Long-Context LLMs with 1000x Input
    Token Reduction (arXiv 2409.17422). Here the last prompt token is always among the chosen.
    """

    paper = "arXiv 2409.17422"

    retention_rate: float | None = DefaultRate(0.1)
    filter_layer: int | None = attrs.field(default=None, kw_only=True)
    kernel_size: int = attrs.field(default=5, kw_only=True)
    retention_tokens: int | None = attrs.field(default=None, kw_only=True)
    protect: int = attrs.field(default=0, kw_only=True)
    prefill_block: None = attrs.field(default=None, init=False, eq=False, repr=False)

    def _parts(self) -> Parts:
        propagation = RestartPropagation(
            filter_layer=self.filter_layer,
            retention_rate=self.retention_rate,
            retention_tokens=self.retention_tokens,
            protect=self.protect,
        )
        return LastQueryProductScorer(kernel_size=self.kernel_size), KeepAllSelector(), propagation
