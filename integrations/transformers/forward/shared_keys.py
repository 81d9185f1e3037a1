"""Give layers that attend to an earlier layer's keys the mask of these keys."""

from __future__ import annotations

import attrs
from torch import Tensor

from kvpolicy.integrations.transformers.forward.layer_masks import LayerMasks
from kvpolicy.integrations.transformers.forward.reaching import ReachingTokens
from kvpolicy.integrations.transformers.model.masks import Mask, Visibility
from kvpolicy.integrations.transformers.state.layer import PolicyLayer


@attrs.frozen(eq=False)
class SharedKeys:
    """A record of the positions and the mask of keys that later layers reuse.

    Args:
        keys: ``[batch, 1 or kv_heads, key_len]`` int64 original positions, -1 on padding.
        queries: ``[batch, query_len]`` int64 original positions, -1 on padding.
        mask: The mask of its queries.
        own: The model's own mask of the pass's tokens, if it is not causal.
        order: The order of its keys, if padding was moved to the left.
        layer: The layer in the cache.
    """

    keys: Tensor
    queries: Tensor
    mask: Mask
    own: Tensor | None
    order: Tensor | None
    layer: PolicyLayer

    @staticmethod
    def of(
        layer: PolicyLayer,
        masks: LayerMasks,
        reach: ReachingTokens,
        hidden: Tensor,
        own: Tensor | None,
        mask: Mask,
    ) -> SharedKeys:
        """Record the keys and the mask of a layer that is about to run.

        Args:
            layer: The layer in the cache.
            masks: The masks of the pass, at this layer.
            reach: The tokens that reach the layer.
            hidden: Its input.
            own: See the class.
            mask: See the class.
        """
        keys = masks.positions(layer, layer.choices, hidden.device)
        return SharedKeys(keys, reach.positions, mask, own, masks.order, layer)

    def mask_for(
        self,
        masks: LayerMasks,
        reach: ReachingTokens,
        hidden: Tensor,
        window: int | None,
        implementation: str,
    ) -> Mask:
        """Return the attention mask for a later layer that reuses these keys.

        Args:
            masks: The masks of the pass.
            reach: The tokens that reach the layer.
            hidden: Its input, which may be that of the last tokens only.
            window: Its sliding window.
            implementation: The model's attention implementation.
        """
        count = hidden.shape[reach.token_axis(hidden)]
        if self.queries is reach.positions and count == self.queries.shape[1]:
            return self.mask
        # Tokens were dropped in between, or the decoder continues with the last tokens only.
        own = masks.own_visibility(self.own, self.keys, self.order)
        if own is not None:
            own = attrs.evolve(own, queries=own.queries[:, -count:])
        places = reach.positions[:, -count:].to(hidden.device)
        heads = self.layer.facts.query_heads if self.keys.shape[1] > 1 else 1
        seen = Visibility(self.keys, places, heads, window, own=own)
        return seen.mask(implementation, hidden.dtype)
