"""Keeps every token: the baseline."""

from __future__ import annotations

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

    @property
    def needs_saliency(self) -> bool:
        """Always False: every token is kept, whatever its saliency."""
        return False

    @property
    def equal_counts(self) -> bool:
        """Always True: every head keeps all tokens."""
        return True

    @property
    def keeps_all(self) -> bool:
        """Always True: nothing is evicted."""
        return True

    def kept_counts(self, context: LayerContext) -> tuple[int, ...] | None:
        """Return the number of tokens in each row; see `KVSelector.kept_counts`."""
        return held_counts(context)

    def select(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        """Return the indices of all tokens; see `KVSelector.select`."""
        valid, counts = context.valid, known_counts(self, context)
        most = int(valid.sum(dim=-1).max()) if counts is None else max(counts)
        return compress(valid, most)
