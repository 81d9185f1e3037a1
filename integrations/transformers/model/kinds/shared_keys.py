"""Define layers that attend to the keys and values of an earlier layer."""

from __future__ import annotations

from kvpolicy.integrations.transformers.model.kinds.base import LayerFacts, LayerKind


class SharedKeys(LayerKind):
    """A layer that makes no keys of its own, and attends to the kept keys of an earlier layer.

    Its positions are those of the earlier layer, the producer. Only the producer's queries decide
    what is kept, so that tokens cannot be dropped after this layer. If tokens were dropped between
    the two layers, this one has queries for the remaining ones only. The producer always runs for
    all tokens that reach it, since others need all keys. Nothing is compiled.
    """

    name = "shared keys"
    attends = False

    @classmethod
    def of(cls, layer: LayerFacts) -> LayerKind | None:
        """See `LayerKind.of`."""
        if layer.producer is None:
            return None
        return cls(window=layer.window, producer=layer.producer)
