"""Layers that attend to a whole prompt, and to the last tokens of what follows."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvpolicy.integrations.transformers.model.kinds.base import LayerFacts, LayerKind


@attrs.frozen
class ReferenceWindow(LayerKind):
    """Keys and values of a first prompt, among which the selector chooses, and a window behind.

    What follows the prompt falls out of the window, be it an answer or another turn, of which a
    policy would keep what nothing sees: there is one turn.

    Args:
        answer_window: Tokens behind the prompt that one of them sees, itself among them.
    """

    name: ClassVar[str] = "reference sliding window"
    answer_window: int

    @classmethod
    def of(cls, layer: LayerFacts) -> LayerKind | None:
        """See `LayerKind.of`."""
        if layer.kind != "reference_sliding_attention" or layer.window is None:
            return None
        return cls(layer.window)
