"""Define layers that attend to the keys and values of an earlier layer."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvpolicy.integrations.transformers.model.kinds.base import LayerFacts, LayerKind


@attrs.frozen
class SharedKeys(LayerKind):
    """A layer without keys of its own: it sees its producer's keys, later the kept ones.

    Only the producer's queries decide what is kept, so that tokens cannot be dropped after this
    layer. After an earlier layer has dropped tokens, it has queries for the remaining ones only.
    """

    name: ClassVar[str] = "shared keys"
    attends: ClassVar[bool] = False

    @classmethod
    def of(cls, layer: LayerFacts) -> LayerKind | None:
        """See `LayerKind.of`."""
        if layer.producer is None:
            return None
        return cls(window=layer.window, producer=layer.producer)
