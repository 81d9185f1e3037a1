"""FastV (arXiv 2403.06764)."""

import attrs

from kvpolicy.policies.documentation import documented
from kvpolicy.policies.methods.method import Method, Parts
from kvpolicy.policies.propagation.visual_tokens import VisualTokenPropagation
from kvpolicy.policies.scorers.accumulated import AccumulatedAttentionScorer
from kvpolicy.policies.selectors.keep_all import KeepAllSelector


@documented
@attrs.frozen
class FastV(Method):
    """Drops half of the image tokens early in prefill; layers keep all tokens that reach them.

    After layer ``tsp_layer`` only ``tsp_rate`` of an image's tokens go on: those to which all
    tokens of the prompt give the most attention, averaged over all query heads. All text goes on.
    In a model that reads text only nothing is dropped.

    Args:
        tsp_layer: Index of the layer after which tokens are dropped, from 0; 1 is the paper's
            K = 2, since it counts the layers that come before.
        tsp_rate: Fraction of the visual tokens that goes on, in (0, 1]; the paper's 1 - R.

    Example:
        >>> FastV(tsp_rate=0.25).propagation
        VisualTokenPropagation(tsp_rate=0.25, tsp_layer=1, window_size=1)

    Source: An Image is Worth 1/2 Tokens After Layer 2: Plug-and-Play Inference Acceleration for
    Large Vision-Language Models (arXiv 2403.06764), section 4. The published code ranks by the
    attention of the last token alone, where the text averages over all; ours follows the text, and
    ``CachePolicy(LastQueryScorer(), KeepAllSelector(), VisualTokenPropagation())`` is the code's.
    """

    paper = "arXiv 2403.06764"

    tsp_layer: int = attrs.field(default=1, kw_only=True)
    tsp_rate: float = attrs.field(default=0.5, kw_only=True)

    def _parts(self) -> Parts:
        propagation = VisualTokenPropagation(tsp_layer=self.tsp_layer, tsp_rate=self.tsp_rate)
        return AccumulatedAttentionScorer(), KeepAllSelector(), propagation
