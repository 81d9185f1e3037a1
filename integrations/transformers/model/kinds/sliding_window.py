"""Layers that attend to the last tokens only."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvpolicy.integrations.transformers.model.kinds.base import LayerFacts, LayerKind


@attrs.frozen
class SlidingWindow(LayerKind):
    """Keys and values of the tokens in the window, which is bound enough.

    Once the context is longer than the window there is nothing to choose, and tokens cannot be
    dropped behind such a layer, which has not seen them all.
    """

    name: ClassVar[str] = "sliding window"

    @classmethod
    def of(cls, layer: LayerFacts) -> LayerKind | None:
        """See `LayerKind.of`."""
        if layer.kind == "local":  # of which Transformers' own cache holds everything
            return None if layer.window is None else cls(window=layer.window)
        known = layer.kind in ("full_attention", "attention", "sliding_attention")
        if not known or layer.cached_as != "DynamicSlidingWindowLayer":
            return None
        return cls(window=layer.window)
