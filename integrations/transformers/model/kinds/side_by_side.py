"""Define layers that have both attention and a recurrent state."""

from __future__ import annotations

from kvpolicy.integrations.transformers.model.kinds.base import LayerFacts, LayerKind

_CACHED_AS = (
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
)


class SideBySide(LayerKind):
    """A layer with attention and a recurrence: keys and values of each token, and a state.

    The policy chooses among keys and values; the state is held whole. Tokens may be dropped after
    this layer, since its queries are seen: both parts have then read all tokens that reached the
    layer, and the state is not changed back. After an earlier layer has dropped tokens, both parts
    read the remaining ones. The layer always runs for all tokens that reach it, also those that it
    drops, since the state needs them. Whatever else it returns for each token is cut together with
    its hidden states. It is given two masks, one for each part; see `MaskArguments`. If several
    layers share a module's weights, a call is assigned to the layer in which it happens.
    """

    name = "attention and recurrent"

    @classmethod
    def of(cls, layer: LayerFacts) -> LayerKind | None:
        """See `LayerKind.of`."""
        if layer.cached_as not in _CACHED_AS:
            return None
        return cls(window=layer.window, states=layer.states)
