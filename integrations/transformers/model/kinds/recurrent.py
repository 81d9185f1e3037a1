"""Define layers that carry a state from token to token: recurrences and convolutions."""

from __future__ import annotations

from kvpolicy.integrations.transformers.model.kinds.base import LayerFacts, LayerKind


class Recurrent(LayerKind):
    """A layer that holds a state of fixed size, of which a policy can evict nothing.

    Tokens cannot be dropped after it, since it has no queries. After a restart, or after an earlier
    layer has dropped tokens, it reads the remaining ones in their order, as if there were no
    others. Its mask tells tokens from padding, and is made for the tokens that reach it.

    No mask makes a state skip padding between tokens, and no token can be removed from a state. So
    draft tokens, `crop` and turns with padding behind tokens are refused. Memory for an answer
    grows in a model with such layers, and nothing is compiled. A model that keeps states in its own
    modules, where calls with another cache change them, is refused.
    """

    name = "recurrent"
    attends = False

    @classmethod
    def of(cls, layer: LayerFacts) -> LayerKind | None:
        """See `LayerKind.of`."""
        return cls(states=layer.states) if layer.cached_as == "LinearAttentionLayer" else None
