"""Layers that carry a state from token to token: recurrences and convolutions."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvpolicy.integrations.transformers.model.kinds.base import LayerFacts, LayerKind


@attrs.frozen
class Recurrent(LayerKind):
    """A state of one size, whatever the number of tokens: there is nothing to choose.

    Tokens cannot be dropped behind such a layer, which has no queries. Behind one that has dropped
    some, it reads those that went on, in their order.
    """

    name: ClassVar[str] = "recurrent"
    attends: ClassVar[bool] = False

    @classmethod
    def of(cls, layer: LayerFacts) -> LayerKind | None:
        """See `LayerKind.of`."""
        return cls(states=layer.states) if layer.cached_as == "LinearAttentionLayer" else None
