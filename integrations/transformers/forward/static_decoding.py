"""Decoding into buffers of a fixed size, which `generate` can compile.

Once a prompt is read, the sizes are known. Then nothing of what one step runs depends on how many
tokens came before: a layer writes its token into a slot counted in a tensor, and sees the slots
whose places lie before the token's. What changes from step to step outside of tensors, such as
which tokens have been seen, is kept outside of what is compiled.
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
from kvpolicy.integrations.transformers.forward.static_masks import LayerMasks
from kvpolicy.integrations.transformers.model.observing import observed_by
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.tokens import SeenTokens

# The attention implementations whose masks are tensors.
IMPLEMENTATIONS = ("eager", "sdpa")


@attrs.define(eq=False)
class StaticKeys:
    """Buffers that a layer's keys and values are written into, one token at a time.

    Args:
        keys: ``[batch, kv_heads, capacity, head_dim]``.
        values: Likewise.
        filled: ``[1]`` int64: slots taken.
        mask: What the token at hand sees of the slots, its own among them.
    """

    keys: Tensor
    values: Tensor
    filled: Tensor
    mask: Tensor

    @property
    def capacity(self) -> int:
        """Slots."""
        return self.keys.shape[2]

    def write(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write one token; returns the whole buffers, whose unused slots the mask hides."""
        self.keys.index_copy_(2, self.filled, keys)
        self.values.index_copy_(2, self.filled, values)
        self.filled.add_(1)
        return self.keys, self.values


@attrs.define(eq=False)
class StaticDecoding:
    """The decoding of one answer; what is compiled reads ``layers`` and ``positions`` only.

    Args:
        layers: Every layer's buffers.
        positions: ``[batch, 1]`` int64: rotary positions of the token at hand, where a restart left
            tokens out; None where they are those that the model is given.
        masks: Those of the layers.
        room: Tokens there is room for; with ``choice``, before layers choose.
        left: Tokens of the answer that there is memory for, layers choosing in between.
        starts: By layer, the slots taken when decoding began, or when layers last chose.
        choice: How layers stay bounded; None where they do not.
        steps: Tokens whose forward has been asked for since.
        rests: Whether the layers hold what they have chosen in memory of their own, and the buffers
            nothing.
    """

    layers: list[StaticKeys]
    positions: Tensor | None
    masks: LayerMasks
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
        """Take up what a prompt has left.

        Args:
            layers: What each layer holds.
            tokens: Those seen.
            windows: Each layer's sliding window; None where it sees all.
            implementation: The model's attention implementation.
            left: The most tokens to come.
            decoding: What bounds the layers.
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
        masks = LayerMasks.of(layers, tokens, windows, implementation, capacities, room)
        buffers: list[StaticKeys] = []
        for index, (layer, (keys, values)) in enumerate(zip(layers, held, strict=True)):
            filled = torch.full((1,), layer.kept_len, device=keys.device)
            mask, ring = masks.of_layer(index).mask, None if choice is None else choice.rings[index]
            tensors = [keys, values, filled, mask]
            if ring is not None:
                # Attention is given it, and shows its queries to whom it names.
                mask = observed_by(mask.view(mask.shape), ring)
                tensors += [mask, ring.queries, ring.slot]
            for tensor in tensors:
                # One address for as long as it lives, which CUDA graphs have to be told.
                torch._dynamo.mark_static_address(tensor)
            buffers.append(StaticKeys(keys, values, filled, mask))
        positions = None if tokens.skipped is None else torch.zeros_like(tokens.lengths)[:, None]
        starts = [layer.kept_len for layer in layers]
        return StaticDecoding(buffers, positions, masks, room, left, starts, choice)

    def advance(self, positions: Tensor, rotary: Tensor) -> None:
        """Make ready for the next token.

        Args:
            positions: ``[batch, 1]``, its own.
            rotary: ``[batch, 1]``, those that it is read at.
        """
        self.masks.advance(self.steps)
        if self.choice is not None:
            self.choice.advance(self.steps)
        if self.positions is not None:
            self.positions.copy_(rotary)
        self.steps += 1

    def follow(self, layers: list[PolicyLayer], tokens: SeenTokens) -> None:
        """Let the layers know of that token, with which ``tokens`` have been seen."""
        for layer in layers:
            layer.written(tokens)

    def unwritten(self) -> int:
        """Tokens of the last steps that not every layer has written."""
        device = self.layers[0].filled.device
        filled = torch.stack([each.filled.to(device) for each in self.layers])
        written = filled - torch.tensor(self.starts, device=device)[:, None]
        return self.steps - int(written.min())

    def read_queries(self, layers: list[PolicyLayer], seen: int) -> None:
        """Let the layers remember the queries of the steps so far; ``seen`` are the columns."""
        if self.choice is not None:
            self.choice.read(layers, self.steps, seen)

    def go_on(self, layers: list[PolicyLayer], tokens: SeenTokens) -> bool:
        """Go on in the same buffers with what the layers have just chosen.

        Args:
            layers: What each layer holds, in memory of its own.
            tokens: Those seen.

        Returns:
            Whether what is held fits the buffers and the shapes of the masks: else nothing has
            changed, and others are to be made.
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
        if not self.masks.take(LayerMasks.of(layers, tokens, *how)):
            return False
        for layer, buffers in zip(layers, self.layers, strict=True):
            layer.move_into(buffers.keys, buffers.values)
            buffers.filled.fill_(layer.kept_len)
        choice.load(layers)
        self.starts, self.steps = [layer.kept_len for layer in layers], 0
        self.room, self.left, self.rests = room, left, False
        return True


# Hooks know no cache but the one in the call: what was compiled with one is right for all. Those of
# two threads may be there at once, so that a second one must change nothing; torch may call one
# without keyword arguments where the other thread has just removed it.


def before_decoder(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A decoder's rotary positions, where a restart left tokens out.

    Raises:
        UnsupportedGenerationError: It is not `generate` that calls.
    """
    if kwargs is None or (static := _static_of(kwargs)) is None:
        return None
    mask = kwargs.get("attention_mask")
    if isinstance(mask, dict):  # by kind of layer, all made of the one that `generate` gave
        mask = next(iter(mask.values()))
    if mask is None or mask.ndim != 4:
        raise UnsupportedGenerationError(
            "a PolicyCache with max_new_tokens must not be read by other calls of the model while "
            "generate decodes into it, got one; use a copy of it, or a cache without max_new_tokens"
        )
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
        return (hidden,), {**given, "attention_mask": static.layers[self.index].mask}


def _static_of(arguments: dict[str, Any]) -> StaticDecoding | RollingDecoding | None:
    for each in arguments.values():
        if isinstance(each, Cache):
            found: StaticDecoding | RollingDecoding | None = getattr(each, "static", None)
            return found
    return None
