"""Layers that read every token by itself."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvpolicy.integrations.transformers.model.kinds.base import LayerFacts, LayerKind


@attrs.frozen
class Tokenwise(LayerKind):
    """An MLP or experts alone, where they are a layer of their own: nothing is held."""

    name: ClassVar[str] = "without attention"
    attends: ClassVar[bool] = False

    @classmethod
    def of(cls, layer: LayerFacts) -> LayerKind | None:
        """See `LayerKind.of`."""
        # Not by the class of their cache, which others share: it is that of layers with borrowed
        # keys, and was that of recurrent ones.
        return cls() if layer.kind in ("mlp", "moe") else None
