"""PromptDistill (arXiv 2503.23274)."""

import attrs

from kvpolicy.budgets import DefaultRate
from kvpolicy.policies.documentation import documented
from kvpolicy.policies.methods.method import Method, Parts
from kvpolicy.policies.propagation.token_selective import TokenSelectivePropagation
from kvpolicy.policies.scorers.last_query import LastQueryProductScorer
from kvpolicy.policies.selectors.keep_all import KeepAllSelector

DEPTH = 14 / 32  # layer 13 of 32


@documented
@attrs.frozen
class PromptDistill(Method):
    """Drops most tokens in the middle of prefill, by the last query's attention.

    After layer ``tsp_layer`` the last token goes on, and the tokens whose keys have the largest
    products with its query, averaged over all query heads and pooled over neighbours. Layers keep
    all keys and values that reach them.

    Args:
        tsp_layer: Index of the layer after which tokens are dropped, from 0; None for the published
            13 of 32 layers, in proportion.
        tsp_rate: Fraction of the context that goes on, in (0, 1].
        kernel_size: Width of the average-pooling, odd.
        tsp_tokens: Number of tokens that go on, at least 1, in place of the rate; 1,024 in the
            published commands.
        protect: First tokens of the context that always go on, at least 0.

    Example:
        >>> list(PromptDistill(tsp_rate=0.2).propagation.acting_layers(num_layers=32))
        [13]

    Source: PromptDistill (arXiv 2503.23274), by its public code. In the code the last token is not
    counted in the chosen number, here it is. In the code earlier layers can be cut to the chosen
    tokens too, and every published command does so; here each layer keeps all tokens that reach it.
    """

    paper = "arXiv 2503.23274"

    tsp_layer: int | None = attrs.field(default=None, kw_only=True)
    tsp_rate: float | None = attrs.field(default=DefaultRate(0.1), kw_only=True)
    kernel_size: int = attrs.field(default=5, kw_only=True)
    tsp_tokens: int | None = attrs.field(default=None, kw_only=True)
    protect: int = attrs.field(default=0, kw_only=True)

    def _parts(self) -> Parts:
        propagation = TokenSelectivePropagation(
            tsp_layer=self.tsp_layer,
            tsp_rate=self.tsp_rate,
            window_size=1,
            tsp_tokens=self.tsp_tokens,
            protect=self.protect,
            tsp_depth=DEPTH if self.tsp_layer is None else None,
        )
        return (
            LastQueryProductScorer(kernel_size=self.kernel_size, own=False),
            KeepAllSelector(),
            propagation,
        )
