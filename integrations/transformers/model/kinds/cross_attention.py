"""Layers that attend to an image's features instead of the tokens."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvpolicy.integrations.transformers.model.kinds.base import LayerFacts, LayerKind


@attrs.frozen
class CrossAttention(LayerKind):
    """Keys and values of images, whatever the number of tokens: there is nothing to choose.

    Each token reads them by itself, and a layer without images is left out. Tokens cannot be
    dropped behind such a layer, whose queries look at no token.
    """

    name: ClassVar[str] = "cross attention"
    attends: ClassVar[bool] = False

    @classmethod
    def of(cls, layer: LayerFacts) -> LayerKind | None:
        """See `LayerKind.of`."""
        return cls() if layer.crosses else None
