"""Define layers that attend to image features instead of tokens."""

from __future__ import annotations

from kvpolicy.integrations.transformers.model.kinds.base import LayerFacts, LayerKind


class CrossAttention(LayerKind):
    """A layer that attends to images, whose keys and values no policy evicts.

    Their number does not depend on the number of tokens. Each token attends to them independently,
    and without images the layer is skipped. Tokens cannot be dropped after it, since its queries
    look at no token.
    """

    name = "cross attention"
    attends = False
    crosses = True

    @classmethod
    def of(cls, layer: LayerFacts) -> LayerKind | None:
        """See `LayerKind.of`."""
        return cls() if layer.crosses else None
