"""Define layers that read every token independently."""

from __future__ import annotations

from kvpolicy.integrations.transformers.model.kinds.base import LayerFacts, LayerKind


class Tokenwise(LayerKind):
    """A layer that is only an MLP or experts, and holds nothing in the cache."""

    name = "without attention"
    attends = False

    @classmethod
    def of(cls, layer: LayerFacts) -> LayerKind | None:
        """See `LayerKind.of`."""
        # The class in the cache cannot tell: layers with borrowed keys have the same one, and
        # recurrent layers had it too.
        return cls() if layer.kind in ("mlp", "moe") else None
