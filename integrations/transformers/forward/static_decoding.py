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
from torch.nn.functional import pad
from transformers import Cache

from kvpolicy.errors import UnsupportedGenerationError
from kvpolicy.integrations.transformers.model.masks import Mask, Visibility
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.tokens import SeenTokens

# The attention implementations whose masks are tensors.
IMPLEMENTATIONS = ("eager", "sdpa")


@attrs.define(eq=False)
class StaticMask:
    """What the next token sees of the slots of one layer, or of several that are alike.

    It is written to between two steps, outside of what is compiled.

    Args:
        mask: ``[1 or batch, 1 or query_heads, 1, capacity]``, as `Visibility.mask` makes it.
        slot: The next token's.
        window: What the first token sees through a sliding window, by place, and the model's
            attention implementation; None where nothing falls out of one.
    """

    mask: Tensor
    slot: int
    window: tuple[Visibility, str] | None

    @staticmethod
    def of(
        layer: PolicyLayer, capacity: int, implementation: str, dtype: torch.dtype
    ) -> StaticMask:
        """The mask of a layer that sees all that it holds."""
        held, length = layer.positions, layer.kept_len
        assert held is not None
        visible = torch.ones(1, 1, length, dtype=torch.int64, device=held.device)
        if layer.padded:
            visible = held if layer.ragged else held[:, :1]
        slots = pad(visible, (0, capacity - length), value=-1).clamp(max=0)
        seen = Visibility(slots, slots.new_zeros(slots.shape[0], 1), layer.query_heads)
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
        """The mask of a layer that sees a sliding window."""
        held, length = layer.positions, layer.kept_len
        assert held is not None
        own = tokens.lengths.to(held.device)[:, None]
        new = own + torch.arange(capacity - length, device=held.device)
        places = torch.cat([held, new[:, None].expand(-1, held.shape[1], -1)], dim=2)
        seen = Visibility(places, own, layer.query_heads, window)
        mask = _tensor(seen.mask(implementation, dtype))
        return StaticMask(mask, length, (seen, implementation))

    def advance(self, step: int) -> None:
        """Show the token of a step, counted from 0."""
        if self.window is not None:
            first, implementation = self.window
            seen = attrs.evolve(first, queries=first.queries + step)
            self.mask.copy_(_tensor(seen.mask(implementation, self.mask.dtype)))
            return
        self.mask[..., self.slot] = True if self.mask.dtype == torch.bool else 0.0
        self.slot += 1


def _tensor(mask: Mask) -> Tensor:
    assert isinstance(mask, Tensor)  # those of `IMPLEMENTATIONS` are
    return mask


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
        masks: Those of the layers, each once.
        starts: By layer, the slots taken when decoding began.
        room: Tokens there is room for.
        steps: Tokens whose forward has been asked for.
    """

    layers: list[StaticKeys]
    positions: Tensor | None
    masks: list[StaticMask]
    starts: list[int]
    room: int
    steps: int = 0

    @staticmethod
    def of(
        layers: list[PolicyLayer],
        tokens: SeenTokens,
        windows: list[int | None],
        implementation: str,
        room: int,
    ) -> StaticDecoding:
        """Take up what a prompt has left.

        Args:
            layers: What each layer holds.
            tokens: Those seen.
            windows: Each layer's sliding window; None where it sees all.
            implementation: The model's attention implementation.
            room: The most tokens to come.
        """
        buffers: list[StaticKeys] = []
        masks: dict[Any, StaticMask] = {}
        starts = [layer.kept_len for layer in layers]
        for index, (layer, window) in enumerate(zip(layers, windows, strict=True)):
            keys, values = layer.claim()
            kind: Any = (layer.kept_len, keys.shape[2], keys.device)
            if window is not None and window < tokens.seen + room:
                how = window, keys.shape[2], implementation, keys.dtype
                masks[index] = mask = StaticMask.sliding(layer, tokens, *how)
            elif layer.padded or kind not in masks:
                # Layers that hold equally much, none of it padding, see alike.
                mask = StaticMask.of(layer, keys.shape[2], implementation, keys.dtype)
                masks[index if layer.padded else kind] = mask
            else:
                mask = masks[kind]
            filled = torch.full((1,), layer.kept_len, device=keys.device)
            for tensor in (keys, values, filled, mask.mask):
                # One address for as long as it lives, which CUDA graphs have to be told.
                torch._dynamo.mark_static_address(tensor)
            buffers.append(StaticKeys(keys, values, filled, mask.mask))
        positions = None if tokens.skipped is None else torch.zeros_like(tokens.lengths)[:, None]
        return StaticDecoding(buffers, positions, list(masks.values()), starts, room)

    def advance(self, positions: Tensor) -> None:
        """Make ready for the next token, which is read at ``positions`` ``[batch, 1]``."""
        for mask in self.masks:
            mask.advance(self.steps)
        if self.positions is not None:
            self.positions.copy_(positions)
        self.steps += 1

    def unwritten(self) -> int:
        """Tokens of the last steps that not every layer has written."""
        device = self.layers[0].filled.device
        filled = torch.stack([each.filled.to(device) for each in self.layers])
        written = filled - torch.tensor(self.starts, device=device)[:, None]
        return self.steps - int(written.min())


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


def _static_of(arguments: dict[str, Any]) -> StaticDecoding | None:
    for each in arguments.values():
        if isinstance(each, Cache):
            found: StaticDecoding | None = getattr(each, "static", None)
            return found
    return None
