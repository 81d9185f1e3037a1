"""Layers that hold one latent for all heads of a token."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvpolicy.integrations.transformers.model.kinds.base import LayerFacts, LayerKind


@attrs.frozen
class LatentAttention(LayerKind):
    """A latent and a rotary key of every token, of which attention makes keys and values (MLA).

    A policy's scorer is shown the keys and values that attention makes, head by head; there is one
    choice for all heads, by the mean of their saliency, and what is held are the latents. That
    follows from what the attention function is called with, not from here, so that it goes for any
    layer whose module makes more heads of what the cache hands out.
    """

    name: ClassVar[str] = "latent attention"

    @classmethod
    def of(cls, layer: LayerFacts) -> LayerKind | None:
        """See `LayerKind.of`."""
        known = layer.kind in ("full_attention", "attention")
        plain = layer.cached_as in (None, "DynamicLayer")
        return cls() if layer.latent and known and plain else None
