"""Layers that attend and carry a state as well."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvpolicy.integrations.transformers.model.kinds.base import LayerFacts, LayerKind

_CACHED_AS = (
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
)


@attrs.frozen
class SideBySide(LayerKind):
    """Keys and values of every token, and a state beside them.

    The policy chooses among keys and values; the state is held whole. Tokens may be dropped behind
    such a layer, whose queries are seen: both of its parts have read all that reached it by then,
    and nothing of its state is taken back. Behind one that has dropped some, both read those that
    went on. The layer is run for all of its tokens, whichever go on, since the state needs them.
    """

    name: ClassVar[str] = "attention and recurrent"

    @classmethod
    def of(cls, layer: LayerFacts) -> LayerKind | None:
        """See `LayerKind.of`."""
        if layer.cached_as not in _CACHED_AS:
            return None
        return cls(window=layer.window, states=layer.states)
