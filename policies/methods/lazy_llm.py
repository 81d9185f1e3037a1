"""LazyLLM's prefill (arXiv 2407.14057)."""

import attrs

from kvpolicy.checks import check_rate
from kvpolicy.policies.documentation import documented
from kvpolicy.policies.methods.method import Method, Parts
from kvpolicy.policies.propagation.shared import as_layers
from kvpolicy.policies.propagation.staged import StagedPropagation
from kvpolicy.policies.propagation.token_selective import TokenSelectivePropagation
from kvpolicy.policies.scorers.last_query import LastQueryScorer
from kvpolicy.policies.selectors.keep_all import KeepAllSelector

DEPTHS = (0.3, 0.6, 0.9)  # after the 9th, 19th and 28th of 32 layers


@documented
@attrs.frozen
class LazyLLM(Method):
    """Drops some of the tokens three times in one prefill, by the attention of the last token.

    After each of ``tsp_layers`` a share ``tsp_rate`` of the remaining tokens go on: those to
    which the last token gives the most attention, averaged over all query heads. Layers keep all
    keys and values that reach them.

    Args:
        tsp_rate: Fraction of the tokens left that goes on after each layer, in (0, 1].
        tsp_layers: Indices of the layers after which tokens are dropped, from 0; None for
            three, after three, six and nine tenths of the model, 8, 18 and 27 of 32.
        protect: First tokens of the context that always go on, at least 0.

    Example:
        >>> rates = LazyLLM().propagation.layer_rates(num_layers=32)
        >>> [round(rates[layer], 3) for layer in (8, 9, 19, 28)]
        [1.0, 0.7, 0.49, 0.343]

    Source: LazyLLM (arXiv 2407.14057); no code was published. Only its prefill: in the paper a
    dropped token can return while decoding, by its stored hidden states. Layers and rate are those
    of the paper's figures, since its settings for each task are not published. Here the rates are
    powers of ``tsp_rate`` that refer to the whole context, rounded down once.
    """

    paper = "arXiv 2407.14057"

    tsp_rate: float = attrs.field(default=0.7, kw_only=True)
    tsp_layers: tuple[int, ...] | None = attrs.field(
        default=None, converter=as_layers, kw_only=True
    )
    protect: int = attrs.field(default=0, kw_only=True)

    def _parts(self) -> Parts:
        check_rate("tsp_rate", self.tsp_rate)
        places = DEPTHS if self.tsp_layers is None else self.tsp_layers
        stages = [
            TokenSelectivePropagation(
                tsp_layer=None if self.tsp_layers is None else self.tsp_layers[index],
                tsp_rate=self.tsp_rate ** (index + 1),
                window_size=1,
                protect=self.protect,
                tsp_depth=DEPTHS[index] if self.tsp_layers is None else None,
            )
            for index in range(len(places))
        ]
        return LastQueryScorer(), KeepAllSelector(), StagedPropagation(stages)
