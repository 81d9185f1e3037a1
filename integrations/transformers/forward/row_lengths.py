"""Count how many tokens of each row a layer sees, with as few reads of tensors as possible."""

from __future__ import annotations

import functools

from torch import Tensor

from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.tokens import SeenTokens


class RowLengths:
    """A counter of the tokens of each row, for a forward on which the policy acts.

    Args:
        before: The tokens seen before the forward.
        new_valid: ``[batch, new_len]`` bool, the forward's tokens that reach the current layer.
        padded: Whether any of these may be padding.
    """

    def __init__(self, before: SeenTokens, new_valid: Tensor, *, padded: bool) -> None:
        self._before = before
        self._new_valid = new_valid
        batch, new_len = new_valid.shape
        self._new = None if padded else (new_len,) * batch

    @property
    def new(self) -> tuple[int, ...]:
        """The number of the forward's tokens that reach the current layer, for each row."""
        if self._new is None:
            self._new = tuple(self._new_valid.sum(dim=1).tolist())
        return self._new

    @functools.cached_property
    def appended(self) -> tuple[int, ...]:
        """The number of tokens that layers hold behind the kept ones, for each row."""
        appended = self._before.appended
        if self._before.padded:
            return tuple((appended >= 0).sum(dim=1).tolist())
        return (appended.shape[1],) * len(appended)

    def seen_by(self, layer: PolicyLayer) -> tuple[int, ...] | None:
        """Return how many tokens a layer sees, held and new ones; None if unknown.

        See `LayerContext.held_len`.
        """
        if layer.held is None:
            return self.new
        if layer.counts is None:
            return None
        return tuple(map(sum, zip(layer.counts, self.appended, self.new, strict=True)))

    def passed_on(self, new_valid: Tensor) -> bool:
        """Continue with the tokens ``new_valid``; return True if any of them is padding."""
        self._new_valid, self._new = new_valid, None
        return min(self.new) < new_valid.shape[1]
