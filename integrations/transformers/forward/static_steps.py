"""Decode into `StaticLayer`s of Transformers, which `generate` can compile.

A compiled step reads only buffers, a counter and masks. Two hooks (`BeforeLayer` and
`before_decoder`) find the cache in the call, so that the code compiled with one cache serves all
caches. `generate` asks for a mask before every token: then the masks of the layers are moved on,
outside of the compiled code.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import Cache

from kvpolicy.errors import UnsupportedGenerationError
from kvpolicy.integrations.transformers.forward.lent_layers import LentBuffers
from kvpolicy.integrations.transformers.model.attachment import Attachment
from kvpolicy.integrations.transformers.model.masks import Mask, Visibility
from kvpolicy.integrations.transformers.model.modules import signature
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.tokens import SeenTokens


@attrs.define(eq=False)
class StaticMask:
    """The attention mask with which the next token sees the cache slots of one or more layers.

    It is written to between two steps, outside of compiled code.

    Args:
        mask: ``[1 or batch, 1 or query_heads, 1, capacity]``, in the form of `Visibility.mask`.
        slot: The slot of the next token.
        first: What the first token sees through a sliding window; None if no token leaves a window.
    """

    mask: Tensor
    slot: int
    implementation: str
    first: Visibility | None

    @staticmethod
    def of(
        layer: PolicyLayer,
        tokens: SeenTokens,
        window: int | None,
        capacity: int,
        implementation: str,
    ) -> StaticMask:
        """Make the mask with which the next token sees what a layer holds."""
        held, length = layer.positions, layer.kept_len
        assert held is not None
        if window is None:
            visible = torch.ones(1, 1, length, dtype=torch.int64, device=held.device)
            if layer.contents.padded:
                visible = held if layer.contents.ragged else held[:, :1]
            places = pad(visible, (0, capacity - length), value=-1).clamp(max=0)
            own = places.new_zeros(places.shape[0], 1)
        else:
            own = tokens.lengths.to(held.device)[:, None]
            new = own + torch.arange(capacity - length, device=held.device)
            places = torch.cat([held, new[:, None].expand(-1, held.shape[1], -1)], dim=2)
        seen = Visibility(places, own, layer.facts.query_heads, window)
        mask = _tensor(seen.mask(implementation, layer.dtype))
        return StaticMask(mask, length, implementation, None if window is None else seen)

    def advance(self, step: int) -> None:
        """Update the mask so that the token of decoding step ``step`` sees its own slot too."""
        if self.first is not None:
            seen = attrs.evolve(self.first, queries=self.first.queries + step)
            self.mask.copy_(_tensor(seen.mask(self.implementation, self.mask.dtype)))
            return
        self.mask[..., self.slot] = True if self.mask.dtype == torch.bool else 0.0
        self.slot += 1


def _tensor(mask: Mask) -> Tensor:
    assert isinstance(mask, Tensor)  # true for all `DENSE` implementations
    return mask


@attrs.define(eq=False)
class StaticSteps:
    """The steps of an answer in buffers of a fixed size, each of which `generate` may compile.

    Args:
        masks: By layer, the mask for the current token, its own slot included.
        mask_of: The same as tensors.
        first: ``[batch, 1]``, the rotary position of the first token.
        positions: The same of the current token, if a restart has left tokens out; None if they are
            the positions that the model is given.
        steps: Number of tokens whose forward was asked for.
        recorded: How many of these the record of seen tokens contains.
    """

    layers: list[LentBuffers]
    masks: list[StaticMask]
    mask_of: list[Tensor]
    first: Tensor
    positions: Tensor | None
    steps: int = 0
    recorded: int = 0

    @staticmethod
    def of(
        layers: list[PolicyLayer], tokens: SeenTokens, attachment: Attachment, room: int | None
    ) -> StaticSteps:
        """Make the buffers and masks, and give the model the hooks for decoding."""
        assert room is not None
        parts = attachment.parts
        buffers = [LentBuffers(layer) for layer in layers]
        masks = []
        known: dict[Any, StaticMask] = {}  # layers that hold as many tokens share one
        for layer, each, window in zip(layers, buffers, parts.windows, strict=True):
            capacity = each.max_cache_len
            slides = window is not None and window < tokens.seen + room
            alone = slides or layer.contents.padded
            alike = object() if alone else (layer.kept_len, capacity, layer.device)
            if alike not in known:
                how = window if slides else None, capacity, parts.implementation
                known[alike] = StaticMask.of(layer, tokens, *how)
            masks.append(known[alike])
        mask_of = [each.mask for each in masks]
        for each, mask in zip(buffers, mask_of, strict=True):
            for tensor in (each.keys, each.values, each.cumulative_length, mask):
                # CUDA graphs must know that this tensor never changes its address.
                torch._dynamo.mark_static_address(tensor)
        one = torch.ones(tokens.batch, 1, dtype=torch.bool, device=tokens.valid.device)
        first = tokens.rotary_positions_of(one)
        positions = None if tokens.skipped is None else first.clone()
        forwards = [signature(type(layer).forward).parameters for layer in parts.layers]
        hooks = [BeforeLayer(i, tuple(names)[1:]) for i, names in enumerate(forwards)]  # after self
        attachment.decode(before_decoder, hooks)
        return StaticSteps(buffers, masks, mask_of, first, positions)

    def advance(self) -> Tensor:
        """Prepare the next step: its masks and its rotary position; return its placeholder mask."""
        for each in dict.fromkeys(self.masks):
            each.advance(self.steps)
        if self.positions is not None:
            self.positions.copy_(self.first + self.steps)
        self.steps += 1
        return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.first.device)


# Hooks use only the cache in the call, so that code compiled with one cache is right for all. The
# hooks of two threads may be registered at once, so that running a hook twice must change nothing.
# Torch may call a hook without keyword arguments if the other thread has just removed it.


def before_decoder(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Hook before the decoder: replace the rotary positions, if a restart has left tokens out."""
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
    """A hook before a decoder layer that gives the layer its own mask while decoding."""

    index: int
    names: tuple[str, ...]

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Replace the argument ``attention_mask`` by the layer's own mask."""
        given = {**dict(zip(self.names, args, strict=False)), **(kwargs or {})}
        static = _static_of(given)
        if static is None:
            return None
        hidden = given.pop(self.names[0])
        return (hidden,), {**given, "attention_mask": static.mask_of[self.index]}


def _static_of(arguments: dict[str, Any]) -> StaticSteps | None:
    for each in arguments.values():
        if isinstance(each, Cache):
            found: StaticSteps | None = getattr(each, "_static", None)
            return found
    return None
