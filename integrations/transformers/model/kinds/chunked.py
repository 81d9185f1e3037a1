"""Define layers that attend only inside a chunk of the context."""

from __future__ import annotations

from kvpolicy.integrations.transformers.model.kinds.base import LayerFacts, LayerKind
from kvpolicy.integrations.transformers.model.masks import Chunk


class ChunkedAttention(LayerKind):
    """A layer that attends only within chunks of the context, so that it needs no policy.

    Chunks begin at multiples of their length, counted in original positions even after tokens were
    dropped in earlier layers. In a context longer than a chunk the policy chooses nothing in this
    layer. Tokens cannot be dropped after it, since it has not seen all of them.
    """

    name = "chunked attention"

    @classmethod
    def of(cls, layer: LayerFacts) -> LayerKind | None:
        """See `LayerKind.of`."""
        if layer.kind != "chunked_attention" or layer.window is None:
            return None
        return cls(window=Chunk(layer.window))
