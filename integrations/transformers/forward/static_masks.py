"""Make the masks of decoded tokens over fixed buffers, updated between two steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpolicy.integrations.transformers.model.masks import Mask, Visibility
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.tokens import SeenTokens


@attrs.define(eq=False)
class StaticMask:
    """The attention mask with which the next token sees the cache slots of one or more layers.

    It is written to between two steps, outside of compiled code.

    Args:
        mask: ``[1 or batch, 1 or query_heads, 1, capacity]``, in the form of `Visibility.mask`.
        slot: The slot of the next token.
        window: What the first token sees through a sliding window, and the model's attention
            implementation; None if no token leaves a window.
    """

    mask: Tensor
    slot: int
    window: tuple[Visibility, str] | None

    @staticmethod
    def of(
        layer: PolicyLayer, capacity: int, implementation: str, dtype: torch.dtype
    ) -> StaticMask:
        """Make the mask with which the next token sees all slots that a layer holds."""
        held, length = layer.positions, layer.kept_len
        assert held is not None
        visible = torch.ones(1, 1, length, dtype=torch.int64, device=held.device)
        if layer.contents.padded:
            visible = held if layer.contents.ragged else held[:, :1]
        slots = pad(visible, (0, capacity - length), value=-1).clamp(max=0)
        seen = Visibility(slots, slots.new_zeros(slots.shape[0], 1), layer.facts.query_heads)
        return StaticMask(_tensor(seen.mask(implementation, dtype)), length, None)

    @staticmethod
    def sliding(
        layer: PolicyLayer,
        tokens: SeenTokens,
        window: int,
        capacity: int,
        implementation: str,
        dtype: torch.dtype,
    ) -> StaticMask:
        """Make the mask with which the next token sees a layer's sliding window."""
        held, length = layer.positions, layer.kept_len
        assert held is not None
        own = tokens.lengths.to(held.device)[:, None]
        new = own + torch.arange(capacity - length, device=held.device)
        places = torch.cat([held, new[:, None].expand(-1, held.shape[1], -1)], dim=2)
        seen = Visibility(places, own, layer.facts.query_heads, window)
        mask = _tensor(seen.mask(implementation, dtype))
        return StaticMask(mask, length, (seen, implementation))

    def advance(self, step: int) -> None:
        """Update the mask so that the token of decoding step ``step`` sees its own slot too."""
        if self.window is not None:
            first, implementation = self.window
            seen = attrs.evolve(first, queries=first.queries + step)
            self.mask.copy_(_tensor(seen.mask(implementation, self.mask.dtype)))
            return
        self.mask[..., self.slot] = True if self.mask.dtype == torch.bool else 0.0
        self.slot += 1


def static_masks(
    layers: Sequence[PolicyLayer],
    tokens: SeenTokens,
    windows: Sequence[int | None],
    implementation: str,
    capacities: Sequence[int],
    room: int,
) -> list[StaticMask]:
    """Make the masks with which the next decoded token sees the slots of every layer.

    Layers that hold equal numbers of tokens, without padding, share one mask.
    """
    known: dict[Any, StaticMask] = {}
    masks = []
    for layer, window, capacity in zip(layers, windows, capacities, strict=True):
        assert layer.held is not None
        how = capacity, implementation, layer.dtype
        if window is not None and window < tokens.seen + room:
            masks.append(StaticMask.sliding(layer, tokens, window, *how))
            continue
        alike = (layer.kept_len, capacity, layer.device)
        mask = None if layer.contents.padded else known.get(alike)
        mask = StaticMask.of(layer, *how) if mask is None else mask
        if not layer.contents.padded:
            known[alike] = mask
        masks.append(mask)
    return masks


def _tensor(mask: Mask) -> Tensor:
    assert isinstance(mask, Tensor)  # true for all `IMPLEMENTATIONS`
    return mask
