"""Layers that attend within chunks of the context."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvpolicy.integrations.transformers.model.kinds.base import LayerFacts, LayerKind
from kvpolicy.integrations.transformers.model.masks import Chunk


@attrs.frozen
class ChunkedAttention(LayerKind):
    """Keys and values of the tokens in the chunk at hand, which is bound enough.

    Chunks begin at multiples of their length in original positions, whatever was dropped below.
    Once the context is longer than one there is nothing to choose, and tokens cannot be dropped
    behind such a layer, which has not seen them all.
    """

    name: ClassVar[str] = "chunked attention"

    @classmethod
    def of(cls, layer: LayerFacts) -> LayerKind | None:
        """See `LayerKind.of`."""
        if layer.kind != "chunked_attention" or layer.window is None:
            return None
        return cls(window=Chunk(layer.window))
