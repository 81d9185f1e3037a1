"""Passes every token on: the baseline."""

import attrs
from torch import Tensor

from kvpolicy.context import LayerContext
from kvpolicy.interfaces import PropagationPolicy


@attrs.frozen
class PassAllPropagation(PropagationPolicy):
    """Drops nothing: prefill computes the whole prompt at every layer.

    Example:
        >>> PassAllPropagation().layer_rates(num_layers=3)
        [1.0, 1.0, 1.0]
    """

    needs_saliency = False  # every token goes on, whatever its saliency

    def propagate(self, saliency: Tensor | None, context: LayerContext) -> None:
        """Return None: every token goes on."""
        return
