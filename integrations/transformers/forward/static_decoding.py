"""Decode into buffers of a fixed size, which `generate` can compile.

The sizes are known once a prompt is read. After that, the code of a step does not depend on how
many tokens came before: a layer writes its token into a slot counted in a tensor, and sees the
slots at or before the token's place. State that changes from step to step outside of tensors, such
as which tokens have been seen, is kept outside of the compiled code.
"""

from __future__ import annotations

import inspect
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from transformers import Cache

from kvpolicy.errors import UnsupportedGenerationError
from kvpolicy.integrations.transformers.forward.static_masks import StaticMasks
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.tokens import SeenTokens

# The attention implementations whose masks are tensors.
IMPLEMENTATIONS = ("eager", "sdpa")


@attrs.define(eq=False)
class StaticKeys:
    """A pair of fixed buffers for a layer's keys and values, written token by token.

    Args:
        keys: ``[batch, kv_heads, capacity, head_dim]``.
        values: ``[batch, kv_heads, capacity, head_dim]``.
        filled: ``[1]`` int64, the number of slots taken.
        mask: The mask of the current token over the slots, its own included.
    """

    keys: Tensor
    values: Tensor
    filled: Tensor
    mask: Tensor

    def write(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write one token's keys and values; return the whole buffers, unused slots included."""
        self.keys.index_copy_(2, self.filled, keys)
        self.values.index_copy_(2, self.filled, values)
        self.filled.add_(1)
        return self.keys, self.values


@attrs.define(eq=False)
class StaticDecoding:
    """A decoding of one answer into fixed buffers, in steps that `generate` may compile.

    Args:
        layers: Every layer's buffers.
        positions: ``[batch, 1]`` int64, rotary positions of the current token after a restart has
            left tokens out; None if they are the positions that the model is given.
        masks: The masks of the layers.
        room: Number of tokens that fit.
        starts: By layer, the number of slots taken when decoding began.
        steps: Number of tokens whose forward was asked for since then.
    """

    layers: list[StaticKeys]
    positions: Tensor | None
    masks: StaticMasks
    room: int
    starts: list[int]
    steps: int = 0

    @staticmethod
    def of(
        layers: list[PolicyLayer],
        tokens: SeenTokens,
        windows: list[int | None],
        implementation: str,
        room: int,
    ) -> StaticDecoding:
        """Make the fixed buffers and masks for decoding after a prompt.

        Args:
            layers: The layers of the cache.
            tokens: The tokens seen.
            windows: Each layer's sliding window; None if it sees all tokens.
            implementation: The model's attention implementation.
            room: The largest number of tokens to come.
        """
        held = [layer.claim() for layer in layers]
        capacities = [keys.shape[2] for keys, _ in held]
        masks = StaticMasks.of(layers, tokens, windows, implementation, capacities, room)
        buffers: list[StaticKeys] = []
        for index, (layer, (keys, values)) in enumerate(zip(layers, held, strict=True)):
            filled = torch.full((1,), layer.kept_len, device=keys.device)
            mask = masks.of_layer(index).mask
            for tensor in (keys, values, filled, mask):
                # CUDA graphs must know that this tensor never changes its address.
                torch._dynamo.mark_static_address(tensor)
            buffers.append(StaticKeys(keys, values, filled, mask))
        positions = None if tokens.skipped is None else torch.zeros_like(tokens.lengths)[:, None]
        starts = [layer.kept_len for layer in layers]
        return StaticDecoding(buffers, positions, masks, room, starts)

    def advance(self, positions: Tensor, rotary: Tensor) -> None:
        """Prepare the next decoding step: its masks and its rotary position.

        Args:
            positions: ``[batch, 1]``, its original positions.
            rotary: ``[batch, 1]``, its rotary positions.
        """
        self.masks.advance(self.steps)
        if self.positions is not None:
            self.positions.copy_(rotary)
        self.steps += 1

    def follow(self, layers: list[PolicyLayer], tokens: SeenTokens) -> None:
        """Count one more token as written in all layers; ``tokens`` is the new token record."""
        for layer in layers:
            layer.written(tokens)

    def unwritten(self) -> int:
        """Count the last tokens whose keys not every layer has written."""
        device = self.layers[0].filled.device
        filled = torch.stack([each.filled.to(device) for each in self.layers])
        written = filled - torch.tensor(self.starts, device=device)[:, None]
        return self.steps - int(written.min())


# Hooks use only the cache in the call, so that code compiled with one cache is right for all. The
# hooks of two threads may be registered at once, so that running a hook twice must change nothing.
# Torch may call a hook without keyword arguments if the other thread has just removed it.


def before_decoder(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Hook before the decoder: replace the rotary positions, if a restart has left tokens out.

    Raises:
        UnsupportedGenerationError: The call does not come from `generate`.
    """
    if kwargs is None or (static := _static_of(kwargs)) is None:
        return None
    mask = kwargs.get("attention_mask")
    if isinstance(mask, dict):  # by kind of layer, all made from the mask of `generate`
        mask = next(iter(mask.values()))
    if mask is None or mask.ndim != 4:
        raise UnsupportedGenerationError(
            "a PolicyCache with max_new_tokens must not be read by other calls of the model "
            "while generate decodes into it; use a copy of it, or a cache without max_new_tokens"
        )
    return (
        None if static.positions is None else (args, {**kwargs, "position_ids": static.positions})
    )


@attrs.frozen
class BeforeLayer:
    """A hook before a decoder layer that gives the layer its own mask while decoding.

    Args:
        index: Index of the layer.
        names: The names of its forward's arguments, in their order.
    """

    index: int
    names: tuple[str, ...]

    @staticmethod
    def of(index: int, layer: nn.Module) -> BeforeLayer:
        """Make the hook for one decoder layer."""
        names = list(inspect.signature(type(layer).forward).parameters)[1:]  # after self
        return BeforeLayer(index, tuple(names))

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Replace the argument ``attention_mask`` by the layer's own mask."""
        given = {**dict(zip(self.names, args, strict=False)), **(kwargs or {})}
        static = _static_of(given)
        if static is None:
            return None
        hidden = given.pop(self.names[0])
        return (hidden,), {**given, "attention_mask": static.layers[self.index].mask}


def _static_of(arguments: dict[str, Any]) -> StaticDecoding | None:
    for each in arguments.values():
        if isinstance(each, Cache):
            found: StaticDecoding | None = getattr(each, "_static", None)
            return found
    return None
