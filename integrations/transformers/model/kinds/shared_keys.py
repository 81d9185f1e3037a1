"""Layers that attend to the keys and values of an earlier one."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvpolicy.integrations.transformers.model.kinds.base import LayerFacts, LayerKind


@attrs.frozen
class SharedKeys(LayerKind):
    """Nothing of its own: it sees what its producer sees, and later what that has kept.

    The producer's queries alone decide what is kept, so that tokens cannot be dropped behind such a
    layer. Behind one that has dropped some, its queries are those of the tokens that went on.
    """

    name: ClassVar[str] = "shared keys"
    attends: ClassVar[bool] = False

    @classmethod
    def of(cls, layer: LayerFacts) -> LayerKind | None:
        """See `LayerKind.of`."""
        if layer.producer is None:
            return None
        return cls(window=layer.window, producer=layer.producer)
