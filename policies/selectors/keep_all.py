"""Keeps every token: the baseline."""

import attrs
from torch import Tensor

from kvpolicy.context import LayerContext
from kvpolicy.host_counts import held_counts, known_counts
from kvpolicy.interfaces import KVSelector
from kvpolicy.selection import compress


@attrs.frozen
class KeepAllSelector(KVSelector):
    """Keeps every token that reaches the layer: evicts nothing.

    Example:
        >>> KeepAllSelector().needs_saliency
        False
    """

    needs_saliency = False  # every token is kept, whatever its saliency
    equal_counts = True  # every head keeps all tokens
    keeps_all = True  # nothing is evicted

    def kept_counts(self, context: LayerContext) -> tuple[int, ...] | None:
        """Return the number of tokens in each row; see `KVSelector.kept_counts`."""
        return held_counts(context)

    def select(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        """Return the indices of all tokens; see `KVSelector.select`."""
        valid, counts = context.valid, known_counts(self, context)
        most = int(valid.sum(dim=-1).max()) if counts is None else max(counts)
        return compress(valid, most)
