"""Define layers that carry a state from token to token: recurrences and convolutions."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvpolicy.integrations.transformers.model.kinds.base import LayerFacts, LayerKind


@attrs.frozen
class Recurrent(LayerKind):
    """A layer that holds a state of fixed size, so that there is nothing to choose.

    Tokens cannot be dropped after it, since it has no queries. After an earlier layer has dropped
    tokens, it reads the remaining ones in their order.
    """

    name: ClassVar[str] = "recurrent"
    attends: ClassVar[bool] = False

    @classmethod
    def of(cls, layer: LayerFacts) -> LayerKind | None:
        """See `LayerKind.of`."""
        return cls(states=layer.states) if layer.cached_as == "LinearAttentionLayer" else None
