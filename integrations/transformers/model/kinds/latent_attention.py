"""Define layers that hold one latent per token for all heads."""

from __future__ import annotations

from kvpolicy.integrations.transformers.model.kinds.base import LayerFacts, LayerKind


class LatentAttention(LayerKind):
    """A layer that holds a latent and a rotary key of each token for all heads together (MLA).

    Attention computes keys and values from them. A policy's scorer sees these keys and values, head
    by head. All heads keep the same tokens, chosen by the mean of their saliency: the selector gets
    a context of one head, with what the layer holds as its keys (`LayerContext._for_selector`). The
    layer holds the latents, the report counts them, and positions are ``[batch, 1, kept_len]``. The
    module's call is recognised as `routing` says. This behaviour does not depend on this class: it
    follows from the inputs of the attention function, for any layer whose module makes more heads
    from the tensors that the cache returns.
    """

    name = "latent attention"

    @classmethod
    def of(cls, layer: LayerFacts) -> LayerKind | None:
        """See `LayerKind.of`."""
        known = layer.kind in ("full_attention", "attention")
        plain = layer.cached_as in (None, "DynamicLayer")
        return cls() if layer.latent and known and plain else None
