"""Make each layer's mask in a pass: where its keys are, and what windows and padding hide.

The model's own mask is right until layers hold or have dropped tokens. After that each layer gets a
mask of its own length, made from positions. A decoded token without padding needs no mask.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers.forward.blocks import Blocks, LowerRight
from kvpolicy.integrations.transformers.forward.facts import Call
from kvpolicy.integrations.transformers.forward.inputs import Incoming
from kvpolicy.integrations.transformers.forward.packed_attention import may_attend
from kvpolicy.integrations.transformers.forward.reaching import ReachingTokens
from kvpolicy.integrations.transformers.model.masks import (
    DENSE,
    FLASH,
    Mask,
    Spans,
    Visibility,
    causal_mask,
)
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.tokens import SeenTokens


class LayerMasks:
    """A maker of the attention masks of all layers in one pass, called layer by layer.

    Attributes:
        windows: Each layer's sliding window; None if it sees all tokens of the context.
        lenders: The layers whose keys other layers use.
        order: ``[batch, kv_heads or 1, key_len]`` int64, the slot that comes to each place of the
            current layer's keys, if padding was moved before tokens; None if the order is as held.
        blocks: How the current layer attends, if not under a mask.
        may_be_own: Whether a layer may have a mask of the model's own that is not causal.
        sees_all: Whether a layer without a mask sees all tokens of the pass.
    """

    def __init__(
        self,
        call: Call,
        layers: list[PolicyLayer],
        reach: ReachingTokens,
        incoming: Incoming,
        tokens: SeenTokens,
        *,
        first: bool,
        in_prompt: bool,
        padding_first: bool,
    ) -> None:
        self._call, self._layers, self._reach, self._tokens = call, layers, reach, tokens
        self._first, self._in_prompt, self._padding_first = first, in_prompt, padding_first
        self._moved, self._order_of_columns = incoming.moved, incoming.order
        self._columns = incoming.columns
        self._implementation = call.implementation
        self._spares = call.model.quirks.spares_masks
        # Flash attention measures windows in slots: its layers must hold all tokens in them.
        seen, flash = tokens.seen, call.implementation in FLASH
        self.windows = [
            window if window is not None and (flash or window < seen) else None
            for window in call.model.windows
        ]
        self.lenders = frozenset(each.producer for each in layers if each.producer is not None)
        self.order: Tensor | None = None
        self.blocks: Blocks | None = None
        self.sees_all = not call.model.causal and first
        self.may_be_own = (call.own_masks or self.sees_all) and reach.count > 1
        self._combined: Tensor | None = None  # positions of the current layer's keys
        self._causal: dict[tuple[int, int], Mask] = {}  # by lengths
        self._own: dict[int, tuple[Any, Spans | None]] = {}  # by the id of the mask
        self._lower_right = LowerRight()
        self._new_positions: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def enter(self, layer: PolicyLayer) -> None:
        """Find the positions of the keys that a layer will attend to, before the layer runs."""
        self.order = self._combined = None
        if not (self._reach.padded or layer.contents.padded):
            return
        heads = layer.choices
        new = self._reach.positions[:, None].expand(-1, heads, -1)
        held = layer.positions
        if held is not None and self._moved is not None:
            index = held.clamp(min=0).flatten(1)
            moved = self._moved.to(held.device).gather(1, index).view_as(held)
            held = moved.masked_fill(held < 0, -1)
        combined = new if held is None else torch.cat([held, new.to(held.device)], dim=2)
        if self._padding_first and held is not None:
            # The sort is stable, so that tokens keep their order.
            self.order = (combined >= 0).to(torch.uint8).argsort(dim=2, stable=True)
            combined = combined.gather(2, self.order)
        self._combined = combined

    def enter_packed(self, index: int) -> bool:
        """True if a layer's only new token sees all slots, and can attend to them unpadded."""
        layer = self._layers[index]
        packed = (
            not self._in_prompt
            and may_attend(layer.contents.held)
            and self._reach.count == 1
            and self._implementation == "sdpa"
            and self._spares
            and self.may_narrow(index)
            and not layer.facts.expands
            and self._call.attended is None
            and self._moved is None
            and not self._has_gaps
        )
        if packed:
            self.order = self._combined = None
        return packed

    @functools.cached_property
    def _has_gaps(self) -> bool:
        """True if a column read since the last eviction is padding, this pass included."""
        return self._reach.padded and bool((self._tokens.appended < 0).any())

    def positions(self, layer: PolicyLayer, kv_heads: int, device: torch.device) -> Tensor:
        """Return the positions ``[batch, kv_heads, key_len]`` of all keys that the layer sees."""
        if self._combined is not None:
            return self._combined.to(device).expand(-1, kv_heads, -1)
        places, how = self._reach.positions, (kv_heads, device)
        known = self._new_positions.get(how)  # the same at all layers until some pass on fewer
        if known is None or known[0] is not places:
            known = places, places.to(device)[:, None].expand(-1, kv_heads, -1)
            self._new_positions[how] = known
        new = known[1]
        held = None if layer.contents.held is None else layer.positions
        return new if held is None else torch.cat([held.expand(-1, kv_heads, -1), new], dim=2)

    def valid_slots(self, layer: PolicyLayer) -> Tensor | None:
        """Return which slots ``[batch, 1 or kv_heads, key_len]`` hold tokens; None if all do."""
        if self._combined is None:
            return None
        differ = layer.contents.ragged or self._moved is not None
        return (self._combined if differ else self._combined[:, :1]) >= 0

    def arguments(self, index: int, hidden: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments ``kwargs`` of a layer with the mask that fits the layer's keys."""
        self.enter(self._layers[index])
        self.blocks = None
        spares = self._spares or kwargs.get("attention_mask") is not None
        if (
            self._first
            and spares
            and self._reach.slots is None
            and not (self._reach.padded and self.windows[index])
            and not (self._call.own_masks and self._order_of_columns is not None)
        ):
            # Nothing is held and nothing was dropped, so the model's own mask is right. There are
            # two exceptions: it measures windows in columns, and it may be older than the
            # reordering of columns.
            return kwargs
        mask = self.mask(index, hidden, self.own(kwargs), blocks=True)
        if not self._layers[index].facts.shows_queries:
            if isinstance(mask, Tensor):  # some layers check its shape
                mask = mask.expand(hidden.shape[0], -1, -1, -1)
            self._check_own_window(index)
        return {**kwargs, "attention_mask": mask}

    def _check_own_window(self, index: int) -> None:
        """Check that a layer whose window counts columns gets no padding between tokens.

        Without it, columns are at most as far apart as positions, so that the mask hides as much.
        """
        held = self._layers[index].kept_len and not self._padding_first
        if held and self.windows[index] is not None and not bool(self._reach.valid.all()):
            raise UnsupportedModelError(
                "rows must not be padded after earlier turns if layers count their window in "
                f"columns, as layer {index} does; give rows of one length, or one row at a time"
            )

    def own(self, kwargs: dict[str, Any]) -> Spans | None:
        """Return what the pass's tokens see by the model's own mask; None if this is causal."""
        if not self.may_be_own:
            return None
        mask, places = kwargs.get("attention_mask"), self._reach.every_position
        if id(mask) not in self._own:
            if mask is None and self.sees_all:
                own: Spans | None = Spans.everything(places)
            else:
                own = Spans.of(mask, self._columns, self._order_of_columns, places)
            self._own[id(mask)] = mask, own  # keeps the mask, so that its id stays unique
        return self._own[id(mask)][1]

    def check_order(self, kwargs: dict[str, Any], *, in_chunks: bool) -> None:
        """Check that a prompt whose tokens all see each other comes whole and without padding."""
        if not self.sees_all:
            return
        if in_chunks and kwargs.get("attention_mask") is None:
            raise UnsupportedModelError(
                "a prompt must come in one forward if all of its tokens see each other, as in "
                "PaliGemma without token_type_ids; leave prefill_chunk_size at None"
            )
        if self._reach.padded and self.own(kwargs) is None:
            raise UnsupportedModelError(
                "rows must not be padded if padding changes whether tokens see later ones, as in "
                "PaliGemma without token_type_ids; give rows of one length, or one row at a time"
            )

    def visibility(
        self,
        keys: Tensor,
        heads: int,
        window: int | None,
        own: Spans | None,
        count: int | None = None,
    ) -> Visibility:
        """Return what the last ``count`` tokens that reach the layer see of ``keys``."""
        first = 0 if count is None else self._reach.valid.shape[1] - count
        places = self._reach.positions[:, first:].to(keys.device)
        if own is not None:
            slots = self._reach.slots
            slots = self._reach.everything() if slots is None else slots
            own = own.taken(slots[:, first:]).to(keys.device)
        return Visibility(keys, places, heads if keys.shape[1] > 1 else 1, window, own)

    def mask(
        self, index: int, hidden: Tensor, own: Spans | None = None, *, blocks: bool = False
    ) -> Mask:
        """Make the mask that fits the keys of a layer, or set ``blocks``; None without a mask."""
        layer, window = self._layers[index], self.windows[index]
        if self._implementation in FLASH:
            window = None  # its kernel applies the window
        plain = self._combined is None and window is None and own is None
        query_len = self._reach.valid.shape[1]
        spare = self._spares and not layer.one_choice
        if plain and spare and query_len == 1:
            return None
        same = self._implementation == "sdpa" and layer.contents.held is None
        if plain and spare and same:  # its kernels know causal order
            return None
        if blocks and own is None and self._may_attend_in_blocks(index):
            self.blocks = self._blocks_of(index, hidden.device)
            return None
        if plain:
            lengths = layer.kept_len + query_len, query_len
            if lengths not in self._causal:
                self._causal[lengths] = causal_mask(
                    *lengths, self._implementation, hidden.dtype, hidden.device
                )
            return self._causal[lengths]
        positions = self.positions(layer, layer.choices, hidden.device)
        # Heads may hold different tokens. This matters only if some are padding or outside of the
        # window: otherwise every held token is before all queries.
        if not (layer.contents.ragged or self._moved is not None or window is not None):
            positions = positions[:, :1]
        elif not layer.facts.shows_queries and bool((positions == positions[:, :1]).all()):
            positions = positions[:, :1]  # some layers take one mask for all heads
        seen = self.visibility(positions, layer.facts.query_heads, window, own)
        return seen.mask(self._implementation, hidden.dtype)

    def may_narrow(self, index: int) -> bool:
        """True if a layer may compute its output for only some of its tokens.

        A layer with a state would read the tokens twice, and a layer whose keys other layers use
        must have keys of all tokens.
        """
        return self.windows[index] is None and index in self.apart

    @functools.cached_property
    def apart(self) -> frozenset[int]:
        """The layers that show queries, and whose keys and values no other layer uses."""
        layers = enumerate(self._layers)
        plain = frozenset(i for i, each in layers if each.plain and each.facts.shows_queries)
        return plain - self.lenders

    def _may_attend_in_blocks(self, index: int) -> bool:
        unseen = self._call.attended is None and self._spares  # weights and masks are not read
        dense = self._implementation in DENSE
        return self._in_prompt and unseen and dense and index in self.apart

    def _blocks_of(self, index: int, device: torch.device) -> Blocks:
        layer, window, keys = self._layers[index], self.windows[index], None
        if self._combined is not None or window is not None:
            keys = self.positions(layer, layer.choices, device)
            if keys.shape[1] > 1 and bool((keys == keys[:, :1]).all()):
                keys = keys[:, :1]
        places = self._reach.positions.to(device)
        return Blocks(self._implementation, self._lower_right, keys, places, window)
