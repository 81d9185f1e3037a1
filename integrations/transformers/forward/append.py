"""Append one forward's tokens to a `PolicyCache`: which reach which layer, under which mask."""

from __future__ import annotations

import functools
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from transformers import Cache

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.host_counts import on_device
from kvpolicy.integrations.transformers.forward.attentions import AttendedKeys
from kvpolicy.integrations.transformers.forward.indexers import new_places, with_positions
from kvpolicy.integrations.transformers.forward.inputs import Incoming, take_columns
from kvpolicy.integrations.transformers.forward.layer_arguments import cut_arguments
from kvpolicy.integrations.transformers.forward.layer_probe import LayerProbe
from kvpolicy.integrations.transformers.forward.output_order import InputOrder
from kvpolicy.integrations.transformers.forward.packed_attention import (
    Unpacked,
    may_attend,
    packed_attention,
)
from kvpolicy.integrations.transformers.forward.relative_positions import Columns
from kvpolicy.integrations.transformers.forward.states import check_states_skip_nothing
from kvpolicy.integrations.transformers.model.layer_trial import LayerTrial
from kvpolicy.integrations.transformers.model.mask_arguments import MaskArguments
from kvpolicy.integrations.transformers.model.masks import (
    FLASH,
    Mask,
    OwnVisibility,
    Visibility,
    causal_mask,
)
from kvpolicy.integrations.transformers.model.rotary import Gapless, LayerRotary
from kvpolicy.integrations.transformers.model.routing import (
    Attend,
    AttentionInputs,
    is_plain,
)
from kvpolicy.integrations.transformers.model.temperature import Temperature
from kvpolicy.integrations.transformers.state.cross import CrossLayer
from kvpolicy.integrations.transformers.state.indexed import IndexedLayer
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.packed import Packed
from kvpolicy.integrations.transformers.state.recurrent import (
    EmptyLayer,
    RecurrentLayer,
    SharedLayer,
)
from kvpolicy.integrations.transformers.state.tokens import SeenTokens
from kvpolicy.policy import CachePolicy


@attrs.frozen(eq=False)
class SharedKeys:
    """A record of the keys and the mask of a layer whose keys and values other layers use too.

    Args:
        keys: ``[batch, 1 or kv_heads, key_len]`` int64 original positions, -1 on padding.
        queries: ``[batch, query_len]`` int64 original positions, -1 on padding.
        mask: The mask of its queries.
        own: The model's own mask of the forward's tokens, if it is not causal.
        order: The order of its keys, if padding was moved to the left.
    """

    keys: Tensor
    queries: Tensor
    mask: Mask
    own: Tensor | None
    order: Tensor | None


class Forward:
    """A forward under way: its state from the decoder's first layer to the last.

    This class appends the new tokens in each layer; `ActingForward` also lets the policy act.

    The layers of a model may be on several devices. Tensors about the tokens are on the device of
    the inputs. A layer's tensors, and its context, are on the device of its keys.

    Args:
        policy: The policy.
        layers: The layers of the cache.
        incoming: The forward's tokens and those seen before.
        implementation: The model's attention implementation.
        windows: Each layer's sliding window or chunk; None if it sees all tokens.
        answer_windows: Each layer's window over the tokens that follow a prompt which it sees
            whole; None if it has none.
        temperatures: By layer, how its queries depend on counted positions; None if they do not.
        own_masks: Whether the model makes its masks outside the decoder, so that they may not be
            causal.
        spares_masks: Whether a layer may get no mask if its attention function gives the right
            result without one.
        causal: Whether a token sees no later token in a layer without a mask; else it sees all of a
            prompt.
        attended: A record of the keys each layer attends to; None if attention weights are not
            asked for.
        rotary: The decoder's rotary embedding, for index keys that are rotated late; None without.
        asked: Finds the rotary embeddings and output projections that the policy's parts need; None
            if they need none.
    """

    acts = False  # whether the policy acts on this forward
    in_prompt = False  # whether its tokens belong to a prompt
    bounded = False  # whether its tokens belong to a bounded answer
    missing = 0  # columns of a chunked prompt from this forward's first on; 0: unknown

    def __init__(
        self,
        policy: CachePolicy,
        layers: list[PolicyLayer],
        incoming: Incoming,
        *,
        implementation: str,
        windows: list[int | None],
        answer_windows: list[int | None] | None = None,
        temperatures: list[Temperature | None] | None = None,
        own_masks: bool = False,
        spares_masks: bool = True,
        causal: bool = True,
        attended: AttendedKeys | None = None,
        rotary: Any = None,
        asked: LayerProbe | None = None,
    ) -> None:
        self.policy = policy
        self.layers = layers
        self._before = incoming.tokens
        self.implementation = implementation
        self.first = incoming.tokens.seen == 0
        self.new_valid = incoming.new_valid  # of the tokens that reach the current layer
        self.new_positions = (
            incoming.tokens.positions_of(incoming.new_valid)
            if incoming.positions is None
            else incoming.positions
        )
        self._started = incoming.tokens.lengths > 0  # rows that have read tokens before
        self.tokens = incoming.tokens.extended(
            self.new_positions,
            incoming.columns,
            ids=incoming.ids,
            padded=incoming.padded,
            acts=self.acts,
            skipped=incoming.skipped,
            kinds=incoming.kinds,
            bounded=self.bounded,
        )
        self._new_len = incoming.new_valid.shape[1]
        self._columns = incoming.columns
        self._windows = windows
        self._answer_windows = answer_windows or [None] * len(layers)
        self._temperatures = temperatures or [None] * len(layers)
        self._places = self.new_positions  # positions at which these tokens are read
        self.propagated: dict[int, Tensor] = {}
        self._updated: set[int] = set()
        self._order_of_columns = incoming.order
        self._moved = incoming.moved
        # True also if rows without padding pass on different numbers of tokens.
        self._padded = self.tokens.padded or (
            incoming.positions is not None and not bool(self.new_valid.all())
        )
        self._looked_at: Tensor | None = None  # `new_valid`, when states were last given a mask
        self._has_padding = False  # whether it had padding then
        self._slots: Tensor | None = None  # of the forward's tokens, those that reach the layer
        self._combined: Tensor | None = None  # positions of the current layer's keys
        self._order: Tensor | None = None  # moves padding in the middle to the left
        self._pending: tuple[Tensor, Tensor] | None = None
        # What the previous layer returned beside hidden states, for the tokens it passed on.
        self._beside: tuple[Tensor, ...] = ()
        self._causal: dict[tuple[int, bool], Mask] = {}  # by length, and whether None is allowed
        self._own_masks = own_masks
        self._spares_masks = spares_masks
        self._sees_all = not causal and self.first
        self._attended = attended
        self._rotary = rotary
        self._asked = asked
        self._places_checked = False  # whether `LayerProbe.check_places` has run
        self._gapless = (
            None
            if incoming.skipped is None
            else Gapless(self.new_positions, incoming.tokens.lengths)
        )
        self._every_position = self.new_positions  # of the forward's tokens
        # For each layer whose keys other layers use, what these layers need to know.
        self._lent: dict[int, SharedKeys | None] = {
            layer.producer: None for layer in layers if layer.producer is not None
        }
        self._streams_axis = 1  # the tokens' axis, if hidden states have four axes
        self._inside: int | None = None  # the current layer
        self._told: Columns | None = None  # the columns its attention was told, if it asked
        self._packed = False  # whether it must still attend to packed keys
        self._own_blocks: dict[int, tuple[Any, Tensor | None]] = {}  # by the id of the mask

    # Before a layer.

    def enter_layer(
        self, index: int, module: nn.Module, hidden: Tensor, kwargs: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the arguments that let a decoder layer read only the tokens that reach it.

        Args:
            index: Index of the layer.
            module: The layer.
            hidden: ``[batch, new_len, hidden]``, its input.
            kwargs: Its other arguments, by name.

        Raises:
            UnsupportedModelError: Padding changes how the model reads a row.
        """
        if index == 0:
            self._check_tokens(module, hidden)
        self._find_asked(index, module, hidden, kwargs)
        if index == 0 and self._sees_all and self._padded and self._own_block(kwargs) is None:
            raise UnsupportedModelError(
                "rows must not be padded where the model sees a prompt both ways without padding "
                "and one way with it, as PaliGemma without token_type_ids; give rows of one "
                "length, or one row at a time"
            )
        layer = self.layers[index]
        if isinstance(layer, RecurrentLayer):
            layer.own_states()
        if isinstance(layer, SharedLayer):
            return hidden, self._enter_borrower(index, hidden, kwargs)
        if not layer.attends:
            here = self._reaching(kwargs)
            states = isinstance(layer, RecurrentLayer)
            return hidden, self._for_state(hidden, here) if states else here
        if not isinstance(layer, RecurrentLayer):
            return hidden, self._enter_attention(index, hidden, kwargs)
        names = MaskArguments.of(kwargs)
        here = self._enter_attention(index, hidden, names.taken(kwargs))
        return hidden, names.given(here, self._valid_here(hidden))

    def _enter_attention(
        self, index: int, hidden: Tensor, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the arguments of a layer's attention, for the tokens that reach the layer."""
        layer = self.layers[index]
        self._inside, self._told = index, None
        self._packed = self._attends_packed(index)
        if self._packed:  # needs no mask, and no positions to make one
            self._order = self._combined = None
            here = self._reaching(kwargs)
            self._note_places(here)
            return {**here, "attention_mask": None}
        self._combine(layer)
        if self._attended is not None and not (self.first and self._order_of_columns is None):
            heads = 1 if layer.held is None else layer.held.shape[1]
            self._attended.note(index, self._positions(layer, heads, hidden.device))
        here = self._reaching(kwargs)
        self._note_places(here)
        if isinstance(layer, IndexedLayer):
            return self._for_indexer(index, layer, hidden, here)
        here = self._with_mask(index, hidden, here)
        self._lend(index, hidden, kwargs, here.get("attention_mask"))
        return here

    @property
    def _asks(self) -> bool:
        """True if the policy's parts act on this forward, or later at the end of its prompt."""
        return self.in_prompt

    def _find_asked(
        self, index: int, module: nn.Module, hidden: Tensor, kwargs: dict[str, Any]
    ) -> None:
        """Find a layer's rotary embedding and output projection, if parts need them.

        The layer has not run yet.
        """
        layer = self.layers[index]
        if self._asked is None or not self._asks or not layer.attends:
            return
        if not self._places_checked:
            self._asked.check_places(self._before)
            self._places_checked = True
        axis = self._token_axis(hidden)
        length = hidden.shape[axis]
        last = torch.arange(max(length - 2, 0), length, device=self.new_valid.device)
        slots = last.expand(self.new_valid.shape[0], -1)
        here = {
            name: None if "mask" in name or isinstance(value, Cache) else value
            for name, value in self._reaching(kwargs).items()
        }
        if isinstance(layer, IndexedLayer):  # its indexer reads the mask
            mask = causal_mask(
                last.shape[0],
                last.shape[0],
                implementation=self.implementation,
                dtype=hidden.dtype,
                device=hidden.device,
                spare=False,
            )
            assert isinstance(mask, Tensor)
            here["attention_mask"] = mask.expand(hidden.shape[0], -1, -1, -1)
        attention = self._asked.parts.attentions[index]
        assert attention is not None
        entering = LayerTrial(
            index,
            module,
            attention,
            take_columns(hidden, slots, axis - 1, axis),
            axis,
            cut_arguments(here, slots, length),
            kwargs.get("position_embeddings"),
        )
        places = everything = self._every_position
        if self._gapless is not None:
            places = self._gapless.places(everything[:, None])[:, 0]
        elif self._before.skipped is not None:
            places = (everything - self._before.skipped[:, None]).clamp(min=0)
        self._asked.find(layer, entering, places, everything >= 0)

    def _rotary_of(self, layer: PolicyLayer) -> LayerRotary:
        assert layer.turns is not None
        return LayerRotary(layer.turns, self._gapless)

    def _attends_packed(self, index: int) -> bool:
        """True if a layer's attention can work on packed keys.

        This is so for one new token that sees all slots.
        """
        layer = self.layers[index]
        return (
            type(layer) is PolicyLayer
            and may_attend(layer.held)
            and self._new_len == 1
            and not self.acts
            and self.implementation == "sdpa"
            and self._spares_masks
            and layer.shows_queries
            and not layer.expands
            and index not in self._lent
            and self._attended is None
            and self._moved is None
            and self._window(index) is None
            and self._answer_windows[index] is None
            and not self._has_gaps
        )

    @functools.cached_property
    def _has_gaps(self) -> bool:
        """True if some appended column is padding, columns of this forward included."""
        return self._padded and bool((self.tokens.appended < 0).any())

    def _note_places(self, kwargs: dict[str, Any]) -> None:
        """Remember the positions at which a layer reads the tokens of its arguments."""
        given = kwargs.get("position_ids")
        if not isinstance(given, Tensor) or given.ndim != 2:
            given = self.new_positions
        self._places = given

    def _for_indexer(
        self, index: int, layer: IndexedLayer, hidden: Tensor, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the arguments of a layer whose indexer reads masks and positions itself."""
        own = kwargs.get("attention_mask")
        layer.taking = functools.partial(self.update_index, index)
        if isinstance(own, Tensor) and own.ndim == 2:  # of tokens, from which it makes its own
            kwargs = {**kwargs, "attention_mask": self.new_valid.to(hidden.device)}
        else:
            kwargs = self._with_mask(index, hidden, kwargs)
            mask = kwargs["attention_mask"]
            mask = self._mask(index, hidden) if mask is None else mask
            assert isinstance(mask, Tensor)
            kwargs = {**kwargs, "attention_mask": mask.expand(hidden.shape[0], -1, -1, -1)}
        return with_positions(layer, hidden, kwargs, self._rotary, self._order)

    def _lend(self, index: int, hidden: Tensor, kwargs: dict[str, Any], mask: Mask) -> None:
        """Record the keys and the mask of a layer whose keys other layers use."""
        if index in self._lent:
            layer = self.layers[index]
            self._lent[index] = SharedKeys(
                self._positions(layer, layer.choices, hidden.device),
                self.new_positions,
                mask,
                self._own_block(kwargs),
                self._order,
            )

    def _enter_borrower(self, index: int, hidden: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a layer that attends to another layer's keys.

        It gets that layer's mask.
        """
        producer = self.layers[index].producer
        assert producer is not None
        lent = self._lent[producer]
        assert lent is not None
        here = self._reaching(kwargs)
        if self._attended is not None:
            self._attended.note(index, lent.keys)
        count = hidden.shape[self._token_axis(hidden)]
        if lent.queries is self.new_positions and count == lent.queries.shape[1]:
            return {**here, "attention_mask": lent.mask}
        # Tokens were dropped in between, or the decoder continues with the last tokens only.
        self._order = lent.order
        own = self._own_visibility(lent.own, lent.keys)
        if own is not None:
            own = attrs.evolve(own, queries=own.queries[:, -count:])
        places = self.new_positions[:, -count:].to(hidden.device)
        heads = self.layers[producer].query_heads if lent.keys.shape[1] > 1 else 1
        seen = Visibility(lent.keys, places, heads, self._window(index), own=own)
        return {**here, "attention_mask": seen.mask(self.implementation, hidden.dtype)}

    def _token_axis(self, hidden: Tensor) -> int:
        """Return the axis of tokens in hidden states, which follows the axis of rows."""
        return self._streams_axis if hidden.ndim == 4 else 1

    def _check_tokens(self, module: nn.Module, hidden: Tensor) -> None:
        """Check that the first layer gets exactly one hidden state for each token.

        If there are several streams of hidden states, their axis is before the rows or behind the
        tokens.
        """
        if hidden.ndim == 4:
            rows = tuple(self.new_valid.shape)
            axes = [axis for axis in (1, 2) if tuple(hidden.shape[axis - 1 : axis + 1]) == rows]
            if len(axes) != 1:
                raise UnsupportedModelError(
                    f"hidden states {list(hidden.shape)} of several streams must show which axes "
                    f"are the {rows[0]} rows and {rows[1]} tokens; give another number of either"
                )
            self._streams_axis = axes[0]
        if hidden.ndim == 3 and hidden.shape[1] != self.new_valid.shape[1]:
            raise UnsupportedModelError(
                "a decoder must give its layers one hidden state for each token, but "
                f"{type(module).__name__} gets {hidden.shape[1]} for {self.new_valid.shape[1]} "
                "tokens, as where a model puts features of an image before them"
            )

    def _for_state(self, hidden: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a recurrent layer; see `_valid_here`."""
        valid = self._valid_here(hidden)
        # The convolutions of a layer may have a name of their own for this mask.
        own = dict.fromkeys({"conv_mask"} & kwargs.keys(), valid)
        return {**kwargs, **own, "attention_mask": valid}

    def _valid_here(self, hidden: Tensor) -> Tensor | None:
        """Return the padding mask ``[batch, len]`` of a recurrent layer; None without padding.

        Raises:
            UnsupportedModelError: See `check_states_skip_nothing`.
        """
        if not self._padded:
            return None
        if self._looked_at is not self.new_valid:  # once for all layers with the same tokens
            check_states_skip_nothing(self.new_valid, self._started)
            self._looked_at, self._has_padding = self.new_valid, not bool(self.new_valid.all())
        return self.new_valid.to(hidden.device).long() if self._has_padding else None

    def _reaching(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments for the tokens that reach the layer."""
        if self._slots is None:
            return kwargs
        ours = {
            name: each
            for name, each in kwargs.items()
            if any(each is beside for beside in self._beside)
        }
        return {**cut_arguments(kwargs, self._slots, self._new_len), **ours}

    def _with_mask(self, index: int, hidden: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        spares = self._spares_masks or kwargs.get("attention_mask") is not None
        if (
            self.first
            and spares
            and self._slots is None
            and not (self._padded and self._window(index))
            and not (self._own_masks and self._order_of_columns is not None)
        ):
            # Nothing is held and nothing was dropped, so the model's own mask is right. There are
            # two exceptions: it measures windows in columns, and it may be older than the
            # reordering of columns.
            return kwargs
        mask = self._mask(index, hidden, self._own_block(kwargs))
        if not self.layers[index].shows_queries and isinstance(mask, Tensor):
            mask = mask.expand(hidden.shape[0], -1, -1, -1)  # some layers check its shape
            self._check_own_window(index)
        return {**kwargs, "attention_mask": mask}

    def _check_own_window(self, index: int) -> None:
        """Check that a layer that counts its window in columns has no padding between tokens.

        Without padding, columns are at most as far apart as positions, so that the layer's window
        hides nothing that the mask shows.
        """
        behind = not self.acts and self.layers[index].kept_len and self._window(index) is not None
        if behind and not bool(self.new_valid.all()):
            raise UnsupportedModelError(
                f"rows must not be padded behind what was read before where layers, as layer "
                f"{index}, count their window in columns; give rows of one length, or one row at "
                "a time"
            )

    def _own_block(self, kwargs: dict[str, Any]) -> Tensor | None:
        """Return the model's own mask of the forward's tokens; None if it is causal."""
        if not (self._own_masks or self._sees_all) or self._new_len == 1:
            return None
        mask = kwargs.get("attention_mask")
        if id(mask) not in self._own_blocks:
            if mask is None and self._sees_all:
                length = self._new_len
                block: Tensor | None = torch.ones(
                    1, length, length, dtype=torch.bool, device=self._columns.device
                )
            else:
                block = OwnVisibility.block_of(mask, self._columns, self._order_of_columns)
            self._own_blocks[id(mask)] = mask, block  # keeps the mask, so that its id stays unique
        return self._own_blocks[id(mask)][1]

    def _own_visibility(self, block: Tensor | None, positions: Tensor) -> OwnVisibility | None:
        """Map the model's own mask to a layer's keys; None if ``block`` is None.

        ``positions`` are those of the keys, ``[batch, 1 or kv_heads, key_len]``.
        """
        if block is None:
            return None
        batch, heads, key_len = positions.shape
        slots = self._slots
        if slots is None:
            slots = torch.arange(self._new_len, device=block.device).expand(batch, -1)
        slots = slots.to(block.device)
        queries = torch.where(self.new_valid.to(block.device), slots, -1)
        held = queries.new_full((batch, key_len - queries.shape[1]), -1)
        columns = torch.cat([held, queries], dim=1)[:, None].expand(-1, heads, -1)
        if self._order is not None:
            columns = columns.gather(2, self._order[:, :heads].to(columns.device))
        return OwnVisibility(block, queries, columns)

    def _window(self, index: int) -> int | None:
        """Return the layer's sliding window; None if it is not shorter than the context.

        Flash attention measures windows in slots, so that its window is always returned: the layer
        must hold all tokens in it.
        """
        window = self._windows[index]
        if window is None or self.implementation in FLASH:
            return window
        return window if window < self.tokens.seen else None

    def _combine(self, layer: PolicyLayer) -> None:
        self._order = self._combined = None
        if not (self._padded or layer.padded):
            return
        heads = layer.choices
        new = self.new_positions[:, None].expand(-1, heads, -1)
        held = layer.positions
        if held is not None and self._moved is not None:
            index = held.clamp(min=0).flatten(1)
            moved = self._moved.to(held.device).gather(1, index).view_as(held)
            held = moved.masked_fill(held < 0, -1)
        combined = new if held is None else torch.cat([held, new.to(held.device)], dim=2)
        if self.acts and held is not None:
            # The sort is stable, so that tokens keep their order.
            self._order = (combined >= 0).to(torch.uint8).argsort(dim=2, stable=True)
            combined = combined.gather(2, self._order)
        self._combined = combined

    def _mask(self, index: int, hidden: Tensor, own: Tensor | None = None) -> Mask:
        layer, window = self.layers[index], self._window(index)
        answer = self._answer_windows[index]
        query_len = self.new_valid.shape[1]
        if answer is not None and not self.in_prompt and max(self.tokens.since) > answer:
            return self._mask_behind_prompt(layer, answer, hidden)
        key_len = layer.kept_len + query_len
        if self._combined is not None or window is not None or own is not None:
            positions = self._positions(layer, layer.choices, hidden.device)
            # Heads may hold different tokens. This matters only if some are padding or outside of
            # the window: otherwise every held token is before all queries.
            if not (layer.ragged or self._moved is not None or window is not None):
                positions = positions[:, :1]
            elif not layer.shows_queries and bool((positions == positions[:, :1]).all()):
                positions = positions[:, :1]  # some layers take one mask for all heads
            heads = layer.query_heads if positions.shape[1] > 1 else 1
            places = self.new_positions.to(hidden.device)
            among = self._own_visibility(own, positions)
            seen = Visibility(positions, places, heads, window, own=among)
            return seen.mask(self.implementation, hidden.dtype)
        spare = self._spares_masks and not layer.one_choice
        if (key_len, spare) not in self._causal:
            self._causal[key_len, spare] = causal_mask(
                key_len,
                query_len,
                implementation=self.implementation,
                dtype=hidden.dtype,
                device=hidden.device,
                spare=spare,
            )
        return self._causal[key_len, spare]

    def _mask_behind_prompt(self, layer: PolicyLayer, window: int, hidden: Tensor) -> Mask:
        """Make the mask of tokens behind a prompt: they see the kept prompt and a window."""
        positions = self._positions(layer, layer.choices, hidden.device)
        heads = layer.query_heads if positions.shape[1] > 1 else 1
        before, since = self._before, self._before.rows_since
        behind = (before.appended >= 0).sum(dim=1)
        behind = behind if since is None else on_device(since, behind.device)
        prompt = (before.lengths - behind).to(hidden.device)
        places = self.new_positions.to(hidden.device)
        seen = Visibility(positions, places, heads, window, prompt)
        return seen.mask(self.implementation, hidden.dtype)

    def _positions(self, layer: PolicyLayer, kv_heads: int, device: torch.device) -> Tensor:
        """Return the positions ``[batch, kv_heads, key_len]`` of all keys that the layer sees."""
        if self._combined is not None:
            return self._combined.to(device).expand(-1, kv_heads, -1)
        new = self.new_positions.to(device)[:, None].expand(-1, kv_heads, -1)
        held = layer.positions
        return new if held is None else torch.cat([held.expand(-1, kv_heads, -1), new], dim=2)

    # Inside its attention.

    def columns(self, index: int) -> Columns | None:
        """Return the key and query columns that a layer's attention is told, if it asks for them.

        None means that the columns held are right, before anything was dropped or evicted.
        """
        if self._inside != index or (self.first and self._slots is None):
            return None
        count = self._before.seen + self._new_len
        if self._slots is None:
            queries = torch.arange(self._before.seen, count, device=self.new_positions.device)
        else:
            queries = self.new_positions.amax(dim=0)
        self._told = Columns(count, queries)
        return self._told

    def update(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append a layer's new keys and values; return all that its attention must see."""
        layer = self.layers[index]
        self._updated.add(index)
        if self._packed:
            self._pending = Unpacked.pair(layer.append_packed(keys, values))
            return self._pending
        keys, values = layer.append(keys, values, self._before, self.missing)
        if isinstance(layer, IndexedLayer):
            layer.attend_to(keys)
        if self._temperatures[index] is not None or self._told is not None:
            self._pending = keys, values  # wait for its attention function
        return keys, values

    def update_index(self, index: int, keys: Tensor) -> Tensor:
        """Append a layer's new index keys; return all that its indexer must see."""
        layer = self.layers[index]
        assert isinstance(layer, IndexedLayer)
        return layer.append_index(keys, new_places(self.layers, self._slots))

    def note_state(self, index: int) -> None:
        """Note that a layer reads or writes its state."""
        self._updated.add(index)

    def waits_for_queries(self) -> bool:
        """True if the layer's attention function has not been called yet."""
        return self._pending is not None

    def waits_for(self, keys: Tensor, *, own: bool) -> bool:
        """True if this call of an attention function, with ``keys``, is the awaited one.

        A module with latent attention computes its keys from the tensors it got, one key for each
        token.

        Args:
            keys: Keys that the function was given.
            own: Whether the layer's own module calls the function.
        """
        if self._pending is None:
            return False
        given = self._pending[0]
        alike = (keys.shape[0], keys.shape[-2]) == (given.shape[0], given.shape[-2])
        return keys is given or (own and alike)

    def at_own_positions(self, index: int, queries: Tensor) -> Tensor:
        """Return a layer's queries as they are at their right positions.

        A layer may have scaled them for other positions, which it counted itself.
        """
        temperature = self._temperatures[index]
        if temperature is None:
            return queries
        return temperature.corrected(queries, self._before.seen, self._places)

    def before_attention(self, index: int, inputs: AttentionInputs) -> None:
        """Do nothing; subclasses use the queries before attention is computed."""

    def attend(
        self, attend: Attend, module: nn.Module, query: Tensor, *others: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Call the module's attention function, or compute its result from packed keys."""
        if self._packed:
            self._packed = False
            assert self._inside is not None
            held = self.layers[self._inside].held
            given = self._pending or ()
            own = all(one is other for one, other in zip(given, others, strict=False))
            if given and own and is_plain(attend, kwargs):
                assert isinstance(held, Packed)
                return packed_attention(query, held, kwargs.get("scaling")), None
            self._combine(self.layers[self._inside])
            others = (*others[:2], self._mask(self._inside, query), *others[3:])
        if self.implementation in FLASH:
            # From positions with gaps, flash attention would infer several sequences in one row.
            kwargs.pop("position_ids", None)
        if self._told is not None:
            assert self._inside is not None
            layer = self.layers[self._inside]
            keys = self._positions(layer, layer.choices, query.device)
            places = self.new_positions.to(query.device)
            kwargs = self._told.taken(kwargs, places, keys, query.shape[1])
        return attend(module, query, *others, **kwargs)

    def observe(self, index: int, inputs: AttentionInputs) -> None:
        """Stop waiting for queries: the layer has attended."""
        self._pending = None

    # After a layer, and after the last.

    def leave_layer(self, index: int, output: Any) -> Any:
        """Return the layer's output, for the tokens that the next layer gets."""
        return output

    def finish(self) -> SeenTokens:
        """Check that every layer used the cache; return the tokens seen now.

        Raises:
            UnsupportedModelError: A layer did not use the cache, as with gradient checkpointing.
        """
        layers = enumerate(self.layers)
        spared = EmptyLayer, CrossLayer  # a cross layer is skipped without images
        missing = {i for i, each in layers if not isinstance(each, spared)} - self._updated
        if missing:
            raise UnsupportedModelError(
                f"model must give every layer the cache, but layers {sorted(missing)} did not "
                "update it; gradient checkpointing has to be off"
            )
        for layer in self.layers:
            layer.follow(self.tokens)
        return self.tokens

    def in_order(self, output: Any) -> Any:
        """Return the decoder's output in the order of the input's columns; see `InputOrder`."""
        order = InputOrder(self.tokens, self._order_of_columns, self.propagated, self._attended)
        return order.restored(output)
