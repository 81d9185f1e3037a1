"""How many tokens of each row a layer sees, read off tensors as seldom as can be."""

from __future__ import annotations

import functools

from torch import Tensor

from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.tokens import SeenTokens


class RowLengths:
    """Those of a forward on which the policy acts.

    Args:
        before: The tokens seen before it.
        new_valid: ``[batch, new_len]`` bool, its own that reach the layer at hand.
        padded: Whether any of them may be padding.
    """

    def __init__(self, before: SeenTokens, new_valid: Tensor, *, padded: bool) -> None:
        self._before = before
        self._new_valid = new_valid
        batch, new_len = new_valid.shape
        self._new = None if padded else (new_len,) * batch

    @property
    def new(self) -> tuple[int, ...]:
        """The forward's tokens that reach the layer at hand."""
        if self._new is None:
            self._new = tuple(self._new_valid.sum(dim=1).tolist())
        return self._new

    @functools.cached_property
    def appended(self) -> tuple[int, ...]:
        """The tokens that every layer holds behind what the policy last kept."""
        appended = self._before.appended
        if self._before.padded:
            return tuple((appended >= 0).sum(dim=1).tolist())
        return (appended.shape[1],) * len(appended)

    def seen_by(self, layer: PolicyLayer) -> tuple[int, ...] | None:
        """See `LayerContext.held_len`: of what a layer holds and the tokens that reach it."""
        if layer.held is None:
            return self.new
        if layer.counts is None:
            return None
        return tuple(map(sum, zip(layer.counts, self.appended, self.new, strict=True)))

    def passed_on(self, new_valid: Tensor) -> bool:
        """Only some tokens go on, ``new_valid``; whether any of these is padding."""
        self._new_valid, self._new = new_valid, None
        return min(self.new) < new_valid.shape[1]
