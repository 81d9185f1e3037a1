"""Define layers that attend to a whole prompt, and to a window of the tokens after it."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvpolicy.integrations.transformers.model.kinds.base import LayerFacts, LayerKind


@attrs.frozen
class ReferenceWindow(LayerKind):
    """A layer that sees all of the first prompt, and a sliding window of later tokens.

    The selector chooses among the keys and values of the prompt. Later tokens, of an answer or
    another turn, leave the window. A policy would keep some of them though no query sees them, so
    that only one turn is allowed.

    Args:
        answer_window: Number of tokens behind the prompt that such a token sees, itself included.
    """

    name: ClassVar[str] = "reference sliding window"
    answer_window: int

    @classmethod
    def of(cls, layer: LayerFacts) -> LayerKind | None:
        """See `LayerKind.of`."""
        if layer.kind != "reference_sliding_attention" or layer.window is None:
            return None
        return cls(layer.window)
