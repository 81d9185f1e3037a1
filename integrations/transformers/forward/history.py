"""Remember the saliency of a prompt's tokens at earlier layers, for use at later layers.

`CachePolicy.remembered_layers` says which layers must compute it. It is cut together with the
tokens that layers pass on, and forgotten once no later layer looks at it.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from kvpolicy.context import LayerContext
from kvpolicy.policy import CachePolicy
from kvpolicy.selection import gather_slots


@attrs.frozen(eq=False)
class History:
    """A record of the saliencies that earlier layers gave to the tokens that reach this layer.

    By default it is that of a policy that uses no other layer's saliency.

    Args:
        layers: Layers whose saliency a later layer looks at.
        longest: Number of last saliencies that are looked at.
        held: float32 ``[batch, heads, new_len]`` each, the newest last.
    """

    layers: frozenset[int] = frozenset()
    longest: int = 0
    held: tuple[Tensor, ...] = ()

    @staticmethod
    def of(policy: CachePolicy, num_layers: int, choosing: Sequence[int]) -> History:
        """Return the record with which a forward begins, without saliencies."""
        longest = policy.history_layers
        layers = policy.remembered_layers(num_layers, choosing) if longest else frozenset[int]()
        return History(layers, longest)

    def noted(self, saliency: Tensor, context: LayerContext) -> History:
        """Return a copy with the saliency of one more layer, without those no longer needed.

        Args:
            saliency: ``[batch, heads, key_len]``.
            context: The context of that layer.
        """
        new = saliency[..., context.key_len - context.new_len :]
        new = new.float().masked_fill(~context.new_valid[:, None], 0.0)
        return attrs.evolve(self, held=(*self.held, new)[-self.longest :])

    def taken(self, slots: Tensor) -> History:
        """Return a copy for only the tokens in ``slots`` ``[batch, count]``, -1 on padding."""
        return attrs.evolve(
            self,
            held=tuple(
                gather_slots(each[..., None], slots.to(each.device)[:, None])[..., 0]
                for each in self.held
            ),
        )

    def shown(self, device: torch.device) -> tuple[Tensor, ...]:
        """Return the saliencies on a layer's device, for `LayerInputs.history`."""
        return tuple(each.to(device) for each in self.held)
