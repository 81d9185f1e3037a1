"""Define layers that attend to all earlier tokens."""

from __future__ import annotations

from kvpolicy.integrations.transformers.model.kinds.base import LayerFacts, LayerKind


class FullAttention(LayerKind):
    """A layer that attends to all tokens before; a policy evicts its tokens per KV head."""

    name = "full attention"

    @classmethod
    def of(cls, layer: LayerFacts) -> LayerKind | None:
        """See `LayerKind.of`."""
        known = ("full_attention", "attention", "sliding_attention", "global")
        # A layer may be called sliding but have no window.
        plain = layer.cached_as in (None, "DynamicLayer")
        return cls() if layer.kind in known and plain else None
