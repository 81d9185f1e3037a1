"""A scorer that returns saliencies computed elsewhere."""

from __future__ import annotations

import attrs
from torch import Tensor

from kvpolicy import CachePolicy, KVSelector, LayerContext, Scorer
from kvpolicy.policies import GlobalThresholdSelector, GQAGroupSelector, PassAllPropagation

SINKS = 4


@attrs.frozen(eq=False)
class GivenScorer(Scorer):
    """Gives the tokens of every layer the saliency that is stated for it.

    Args:
        of_layers: ``[batch, kv_heads, length]`` for every layer.
    """

    of_layers: tuple[Tensor, ...]

    def score(self, context: LayerContext) -> Tensor:
        """Return the layer's saliency; see `Scorer.score`."""
        found = self.of_layers[context.layer_idx]
        assert found.shape == context.positions.shape
        return found.float().clone()


def selector(name: str, rate: float) -> KVSelector:
    """Return a selector that keeps the sinks: ``global`` or ``equal`` counts in all heads."""
    kind = GlobalThresholdSelector if name == "global" else GQAGroupSelector
    return kind(rate, window_size=0, protect=SINKS)


def given(of_layers: tuple[Tensor, ...], name: str, rate: float) -> CachePolicy:
    """Return a policy that keeps the tokens of highest given saliency."""
    return CachePolicy(GivenScorer(of_layers), selector(name, rate), PassAllPropagation())
