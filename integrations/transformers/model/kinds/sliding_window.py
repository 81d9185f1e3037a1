"""Define layers that attend only to the last tokens."""

from __future__ import annotations

from kvpolicy.integrations.transformers.model.kinds.base import LayerFacts, LayerKind


class SlidingWindow(LayerKind):
    """A layer that holds only the tokens in its sliding window, so that it needs no policy.

    In a context longer than the window the policy chooses nothing in this layer. Tokens cannot be
    dropped after it, since it has not seen all of them. Windows are measured in original positions,
    even after tokens were dropped in earlier layers.
    """

    name = "sliding window"

    @classmethod
    def of(cls, layer: LayerFacts) -> LayerKind | None:
        """See `LayerKind.of`."""
        if layer.kind == "local":  # Transformers' own cache holds all tokens of such a layer
            return None if layer.window is None else cls(window=layer.window)
        known = layer.kind in ("full_attention", "attention", "sliding_attention")
        if not known or layer.cached_as != "DynamicSlidingWindowLayer":
            return None
        return cls(window=layer.window)
