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

from kvpolicy.decoding import DecodingEviction
from kvpolicy.errors import UnsupportedGenerationError
from kvpolicy.integrations.transformers.forward.decoding.static_choosing import StaticChoice
from kvpolicy.integrations.transformers.forward.decoding.static_rolling import RollingDecoding
from kvpolicy.integrations.transformers.forward.static_masks import StaticMasks
from kvpolicy.integrations.transformers.model.observing import observed_by
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

    @property
    def capacity(self) -> int:
        """The number of tokens for which the buffers have slots."""
        return self.keys.shape[2]

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
        room: Number of tokens that fit; with ``choice``, before layers choose.
        left: Number of tokens of the answer that fit if layers choose in between.
        starts: By layer, the number of slots taken when decoding began or when layers last chose.
        choice: How layers stay bounded; None if they are not bounded.
        steps: Number of tokens whose forward was asked for since then.
        rests: Whether the layers hold their chosen slots in their own memory, and the buffers hold
            nothing.
    """

    layers: list[StaticKeys]
    positions: Tensor | None
    masks: StaticMasks
    room: int
    left: int
    starts: list[int]
    choice: StaticChoice | None = None
    steps: int = 0
    rests: bool = False

    @staticmethod
    def of(
        layers: list[PolicyLayer],
        tokens: SeenTokens,
        windows: list[int | None],
        implementation: str,
        left: int,
        decoding: DecodingEviction | None = None,
    ) -> StaticDecoding:
        """Make the fixed buffers and masks for decoding after a prompt.

        Args:
            layers: The layers of the cache.
            tokens: The tokens seen.
            windows: Each layer's sliding window; None if it sees all tokens.
            implementation: The model's attention implementation.
            left: The largest number of tokens to come.
            decoding: The rule that bounds the layers; None if they are not bounded.
        """
        choice, room = None, left
        if decoding is not None:
            choice = StaticChoice.of(decoding, layers, windows, implementation)
            until = decoding.every - tokens.appended.shape[1]
            room = min(until, left)
        held = [
            layer.claim(None if choice is None else choice.capacity_for(index, layer, until, left))
            for index, layer in enumerate(layers)
        ]
        capacities = [keys.shape[2] for keys, _ in held]
        masks = StaticMasks.of(layers, tokens, windows, implementation, capacities, room)
        buffers: list[StaticKeys] = []
        for index, (layer, (keys, values)) in enumerate(zip(layers, held, strict=True)):
            filled = torch.full((1,), layer.kept_len, device=keys.device)
            mask, ring = masks.of_layer(index).mask, None if choice is None else choice.rings[index]
            tensors = [keys, values, filled, mask]
            if ring is not None:
                # Attention gets this mask, and shows its queries to the ring that the mask names.
                mask = observed_by(mask.view(mask.shape), ring)
                tensors += [mask, ring.queries, ring.slot]
            for tensor in tensors:
                # CUDA graphs must know that this tensor never changes its address.
                torch._dynamo.mark_static_address(tensor)
            buffers.append(StaticKeys(keys, values, filled, mask))
        positions = None if tokens.skipped is None else torch.zeros_like(tokens.lengths)[:, None]
        starts = [layer.kept_len for layer in layers]
        return StaticDecoding(buffers, positions, masks, room, left, starts, choice)

    def advance(self, positions: Tensor, rotary: Tensor) -> None:
        """Prepare the next decoding step: its masks, its rotary position, and its query's slot.

        Args:
            positions: ``[batch, 1]``, its original positions.
            rotary: ``[batch, 1]``, its rotary positions.
        """
        self.masks.advance(self.steps)
        if self.choice is not None:
            self.choice.advance(self.steps)
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

    def read_queries(self, layers: list[PolicyLayer], seen: int) -> None:
        """Copy the queries of the decoding steps so far from the buffers to the layers.

        ``seen`` is the number of columns seen.
        """
        if self.choice is not None:
            self.choice.read(layers, self.steps, seen)

    def go_on(self, layers: list[PolicyLayer], tokens: SeenTokens) -> bool:
        """Continue in the same buffers with the slots that layers have just kept, if these fit.

        Args:
            layers: The layers of the cache, with memory of their own.
            tokens: The tokens seen.

        Returns:
            True if the slots fit the buffers and the masks' shapes. Otherwise nothing has changed,
            and new buffers must be made.
        """
        choice, left = self.choice, self.left - self.steps
        assert choice is not None
        capacities = [each.capacity for each in self.layers]
        of_layers = enumerate(zip(layers, capacities, strict=True))
        fits = [choice.fits(index, layer, capacity, left) for index, (layer, capacity) in of_layers]
        if not left or not all(fits):
            return False
        room = min(choice.decoding.every, left)
        how = choice.windows, choice.implementation, capacities, room
        if not self.masks.take(StaticMasks.of(layers, tokens, *how)):
            return False
        for layer, buffers in zip(layers, self.layers, strict=True):
            layer.move_into(buffers.keys, buffers.values)
            buffers.filled.fill_(layer.kept_len)
        choice.load(layers)
        self.starts, self.steps = [layer.kept_len for layer in layers], 0
        self.room, self.left, self.rests = room, left, False
        return True


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


def _static_of(arguments: dict[str, Any]) -> StaticDecoding | RollingDecoding | None:
    for each in arguments.values():
        if isinstance(each, Cache):
            found: StaticDecoding | RollingDecoding | None = getattr(each, "_static", None)
            return found
    return None
