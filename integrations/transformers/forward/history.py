"""What the scorer said of a prompt's tokens at earlier layers, for later ones to look at."""

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
    """The saliencies that earlier layers gave the tokens that reach the layer at hand.

    Args:
        layers: Those whose saliency a later one looks at.
        longest: How many of the last are looked at.
        held: float32 ``[batch, heads, new_len]`` each, the newest last.
    """

    layers: frozenset[int]
    longest: int
    held: tuple[Tensor, ...] = ()

    @staticmethod
    def of(policy: CachePolicy, num_layers: int, choosing: Sequence[int]) -> History:
        """Nothing yet, of a forward.

        Args:
            policy: The policy.
            num_layers: Layers of the model.
            choosing: Those at which the policy chooses.
        """
        longest = policy.history_layers
        layers = policy.remembered_layers(num_layers, choosing) if longest else frozenset[int]()
        return History(layers, longest)

    def noted(self, saliency: Tensor, context: LayerContext) -> History:
        """With the saliency of one more layer; what is further back than looked at goes.

        Args:
            saliency: ``[batch, heads, key_len]``.
            context: The layer.
        """
        new = saliency[..., context.key_len - context.new_len :]
        new = new.float().masked_fill(~context.new_valid[:, None], 0.0)
        return attrs.evolve(self, held=(*self.held, new)[-self.longest :])

    def taken(self, slots: Tensor) -> History:
        """Of the tokens in ``slots`` ``[batch, count]``, which alone go on; -1 on padding."""
        return attrs.evolve(
            self,
            held=tuple(
                gather_slots(each[..., None], slots.to(each.device)[:, None])[..., 0]
                for each in self.held
            ),
        )

    def shown(self, device: torch.device) -> tuple[Tensor, ...]:
        """As `LayerContext.history`, on the device of a layer."""
        return tuple(each.to(device) for each in self.held)
