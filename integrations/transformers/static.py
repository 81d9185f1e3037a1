"""Decoding into buffers of a fixed size, which `generate` can compile.

Once a prompt is read, the sizes are known. Then nothing of what one step runs depends on how many
tokens came before: a layer writes its token into a slot counted in a tensor, and sees the slots
whose places lie before the token's. What changes from step to step outside of tensors, such as
which tokens have been seen, is kept outside of what is compiled.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor, nn
from transformers import Cache

from kvpolicy.integrations.transformers.masks import tensor_mask

if TYPE_CHECKING:
    from kvpolicy.integrations.transformers.layer import PolicyLayer
    from kvpolicy.integrations.transformers.tokens import SeenTokens

# The attention implementations whose masks are tensors, which a step computes by itself.
IMPLEMENTATIONS = ("eager", "sdpa")


@attrs.define(eq=False)
class StaticKeys:
    """Buffers that a layer's keys and values are written into, one token at a time.

    Args:
        keys: ``[batch, kv_heads, capacity, head_dim]``.
        values: Likewise.
        places: ``[1 or batch, 1 or kv_heads, capacity]`` int64: where each slot's token stands, or
            will stand, -1 on padding; what lies before a token's own place is seen by it.
        lead: ``[1 or batch]`` int64: how far the place of a new token is ahead of its slot.
        filled: ``[1]`` int64: slots taken.
        start: Slots that were taken when decoding began.
        query_heads: Query heads, a group for each of ``keys``' heads.
        window: Places a query sees, its own among them; None for all before it.
    """

    keys: Tensor
    values: Tensor
    places: Tensor
    lead: Tensor
    filled: Tensor
    start: int
    query_heads: int
    window: int | None

    @staticmethod
    def of(layer: PolicyLayer, tokens: SeenTokens, window: int | None) -> StaticKeys:
        """Take up a layer that has room for the tokens to come."""
        keys, values = layer.claim()
        length, capacity = layer.kept_len, keys.shape[2]
        slots = torch.arange(capacity, device=keys.device)
        lead = torch.zeros(1, dtype=torch.int64, device=keys.device)
        places = slots[None, None]
        if layer.padded or window is not None:
            # Heads may hold different tokens, which shows where some are padding, or too far away.
            held = layer.positions
            assert held is not None
            held = held if layer.ragged or window is not None else held[:, :1]
            lead = tokens.lengths.to(keys.device) - length
            new = (slots[length:] + lead[:, None])[:, None].expand(-1, held.shape[1], -1)
            places = torch.cat([held, new], dim=2)
        filled = torch.full((1,), length, device=keys.device)
        for tensor in (keys, values, places, lead, filled):
            # One address for as long as it lives, which CUDA graphs have to be told.
            torch._dynamo.mark_static_address(tensor)
        heads = layer.query_heads
        return StaticKeys(keys, values, places, lead, filled, length, heads, window)

    def mask(self, implementation: str, dtype: torch.dtype) -> Tensor:
        """What the next token sees of all slots, once its own is written."""
        own = (self.filled + self.lead)[:, None]
        return tensor_mask(self.places, own, self.query_heads, self.window, implementation, dtype)

    def write(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write one token; returns the whole buffers, whose unused slots the mask hides."""
        self.keys.index_copy_(2, self.filled, keys)
        self.values.index_copy_(2, self.filled, values)
        self.filled.add_(1)
        return self.keys, self.values


@attrs.define(eq=False)
class StaticDecoding:
    """The decoding of one answer: every layer's buffers, and what is true for all of them.

    Args:
        layers: By layer.
        implementation: The model's attention implementation.
        positions: ``[batch, 1]`` int64: rotary positions of the token at hand, where a restart left
            tokens out; None where they are those that the model is given.
        room: Tokens there is room for.
        steps: Tokens whose forward has been asked for; nothing compiled may read it.
    """

    layers: list[StaticKeys]
    implementation: str
    positions: Tensor | None
    room: int
    steps: int = 0

    def written(self) -> int:
        """Tokens that every layer has written."""
        device = self.layers[0].filled.device
        filled = torch.stack([each.filled.to(device) for each in self.layers])
        first = torch.tensor([[each.start] for each in self.layers], device=device)
        return int((filled - first).min())


# Hooks know no cache but the one in the call: what was compiled with one is right for all. Those of
# two threads may be there at once, so that a second one must change nothing; torch may call one
# without keyword arguments where the other thread has just removed it.


def before_decoder(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A decoder's rotary positions, where a restart left tokens out."""
    if kwargs is None or (static := _static_of(kwargs)) is None:
        return None
    return (
        None if static.positions is None else (args, {**kwargs, "position_ids": static.positions})
    )


@attrs.frozen
class BeforeLayer:
    """A decoder layer's own mask.

    Args:
        index: The layer's.
        names: What its forward calls its arguments, in their order.
    """

    index: int
    names: tuple[str, ...]

    @staticmethod
    def of(index: int, layer: nn.Module) -> BeforeLayer:
        """The hook of a layer."""
        names = list(inspect.signature(type(layer).forward).parameters)[1:]  # after self
        return BeforeLayer(index, tuple(names))

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Change ``attention_mask``."""
        given = {**dict(zip(self.names, args, strict=False)), **(kwargs or {})}
        static = _static_of(given)
        if static is None:
            return None
        hidden = given.pop(self.names[0])
        mask = static.layers[self.index].mask(static.implementation, hidden.dtype)
        return (hidden,), {**given, "attention_mask": mask}


def _static_of(arguments: dict[str, Any]) -> StaticDecoding | None:
    for each in arguments.values():
        if isinstance(each, Cache):
            found: StaticDecoding | None = getattr(each, "static", None)
            return found
    return None
