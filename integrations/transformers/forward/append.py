"""One forward over a `PolicyCache`: which tokens reach which layer, and what each layer keeps."""

from __future__ import annotations

import functools
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from transformers import Cache

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.host_counts import on_device
from kvpolicy.integrations.transformers.forward.asked import Asked
from kvpolicy.integrations.transformers.forward.attentions import AttendedKeys
from kvpolicy.integrations.transformers.forward.indexers import new_places, with_positions
from kvpolicy.integrations.transformers.forward.inputs import Incoming, take_columns
from kvpolicy.integrations.transformers.forward.layer_arguments import cut_arguments
from kvpolicy.integrations.transformers.forward.output_order import InputOrder
from kvpolicy.integrations.transformers.forward.packed_attention import (
    Unpacked,
    may_attend,
    packed_attention,
)
from kvpolicy.integrations.transformers.forward.relative_positions import Columns
from kvpolicy.integrations.transformers.forward.states import check_states_skip_nothing
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
from kvpolicy.integrations.transformers.model.trying import Entering
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
class Lent:
    """What a layer sees whose keys and values others attend to as well.

    Args:
        keys: ``[batch, 1 or kv_heads, key_len]`` int64 original positions, -1 on padding.
        queries: ``[batch, query_len]``, likewise.
        mask: That of its queries.
        own: What the layer's own mask says of the forward's tokens, where it is not order alone.
        order: That of its keys, where padding was brought to the left.
    """

    keys: Tensor
    queries: Tensor
    mask: Mask
    own: Tensor | None
    order: Tensor | None


class Forward:
    """The running state of one forward, from the decoder's first layer to its last.

    The new tokens are appended to what each layer holds; `ActingForward` lets the policy act.

    A model's layers may lie on several devices. What the forward knows of its tokens is on that of
    the inputs; what a layer holds, and its context, on that of its keys.

    Args:
        policy: The policy.
        layers: What each layer of the model holds.
        incoming: The forward's tokens and those seen before.
        implementation: The model's attention implementation.
        windows: Each layer's sliding window or chunk; None where it sees all.
        answer_windows: Likewise, of what follows a prompt that is seen whole.
        temperatures: By layer, how its queries depend on counted positions; None where they do not.
        own_masks: Whether the model makes its masks outside of the decoder, where it may know more
            than the order of tokens.
        spares_masks: Whether a layer may get no mask where its attention function would do right
            without.
        causal: Whether a layer without a mask sees no later token; else it sees all of a prompt.
        attended: Where to note which keys each layer attends to; None where nobody asks.
        rotary: The decoder's rotary embedding, for index keys that are turned late; None without.
        asked: Finds what the policy's parts ask for of layers; None where they ask for nothing.
    """

    acts = False  # whether the policy does, on this forward
    in_prompt = False  # whether its tokens are a prompt's
    bounded = False  # whether they are of an answer of which layers hold a bounded number
    missing = 0  # of a prompt in chunks, the columns from the forward's first on; 0: not known

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
        asked: Asked | None = None,
    ) -> None:
        self.policy = policy
        self.layers = layers
        self._before = incoming.tokens
        self.implementation = implementation
        self.first = incoming.tokens.seen == 0
        self.new_valid = incoming.new_valid  # of the tokens that reach the layer at hand
        self.new_positions = (
            incoming.tokens.positions_of(incoming.new_valid)
            if incoming.positions is None
            else incoming.positions
        )
        self._started = incoming.tokens.lengths > 0  # rows of which something has been read
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
        self._places = self.new_positions  # at which the tokens that reach the layer are read
        self.propagated: dict[int, Tensor] = {}
        self._updated: set[int] = set()
        self._order_of_columns = incoming.order
        self._moved = incoming.moved
        # Also where rows without padding pass on different numbers of tokens.
        self._padded = self.tokens.padded or (
            incoming.positions is not None and not bool(self.new_valid.all())
        )
        self._looked_at: Tensor | None = None  # `new_valid`, when states were last given a mask
        self._has_padding = False  # whether it had any
        self._slots: Tensor | None = None  # of the forward's tokens, those that reach the layer
        self._combined: Tensor | None = None  # positions of the keys of the layer at hand
        self._order: Tensor | None = None  # that brings padding in the middle to the left
        self._pending: tuple[Tensor, Tensor] | None = None
        # What the layer before returned beside hidden states, for the tokens that went on.
        self._beside: tuple[Tensor, ...] = ()
        self._causal: dict[tuple[int, bool], Mask] = {}  # by length, and whether none will do
        self._own_masks = own_masks
        self._spares_masks = spares_masks
        self._sees_all = not causal and self.first
        self._attended = attended
        self._rotary = rotary
        self._asked = asked
        self._places_checked = False  # whether what is asked for can be had of tokens seen before
        self._gapless = (
            None
            if incoming.skipped is None
            else Gapless(self.new_positions, incoming.tokens.lengths)
        )
        self._every_position = self.new_positions  # of the forward's tokens
        # By layer whose keys others attend to, what these need to know.
        self._lent: dict[int, Lent | None] = {
            layer.producer: None for layer in layers if layer.producer is not None
        }
        self._streams_axis = 1  # of the tokens, where hidden states have four
        self._inside: int | None = None  # the layer at hand
        self._told: Columns | None = None  # what its attention was told, if it asked
        self._packed = False  # whether it is to attend to what is held packed, and has not
        self._own_blocks: dict[int, tuple[Any, Tensor | None]] = {}  # by the id of the mask

    # Before a layer.

    def enter_layer(
        self, index: int, module: nn.Module, hidden: Tensor, kwargs: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """The arguments under which a decoder layer sees only the tokens that reach it.

        Args:
            index: The layer's.
            module: The layer.
            hidden: ``[batch, new_len, hidden]``, its input.
            kwargs: Its other arguments, by name.

        Raises:
            UnsupportedModelError: The model reads a padded row otherwise than alone.
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
        """The arguments of a layer's attention, for the tokens that reach it."""
        layer = self.layers[index]
        self._inside, self._told = index, None
        self._packed = self._attends_packed(index)
        if self._packed:  # without a mask, nor the positions it would be made of
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
        """Whether the policy's parts are asked, now or when the prompt has ended."""
        return self.in_prompt

    def _find_asked(
        self, index: int, module: nn.Module, hidden: Tensor, kwargs: dict[str, Any]
    ) -> None:
        """Find what the policy's parts ask for of a layer, before it runs."""
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
        if isinstance(layer, IndexedLayer):  # whose indexer reads its mask
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
        entering = Entering(
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
        """Whether a layer's attention may do without unpacking: one token sees all that is held."""
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
        """Whether some appended column is padding, the forward's own among them."""
        return self._padded and bool((self.tokens.appended < 0).any())

    def _note_places(self, kwargs: dict[str, Any]) -> None:
        """Take note of the positions at which the tokens of a layer's arguments are read."""
        given = kwargs.get("position_ids")
        if not isinstance(given, Tensor) or given.ndim != 2:
            given = self.new_positions
        self._places = given

    def _for_indexer(
        self, index: int, layer: IndexedLayer, hidden: Tensor, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """The arguments of a layer with an indexer, which reads masks and positions itself."""
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
        """Note which keys a layer sees, and under which mask, where others attend to them."""
        if index in self._lent:
            layer = self.layers[index]
            self._lent[index] = Lent(
                self._positions(layer, layer.choices, hidden.device),
                self.new_positions,
                mask,
                self._own_block(kwargs),
                self._order,
            )

    def _enter_borrower(self, index: int, hidden: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a layer that attends to another's keys: under that one's mask."""
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
        # Tokens were dropped in between, or the decoder goes on with the last ones.
        self._order = lent.order
        own = self._own_visibility(lent.own, lent.keys)
        if own is not None:
            own = attrs.evolve(own, queries=own.queries[:, -count:])
        places = self.new_positions[:, -count:].to(hidden.device)
        heads = self.layers[producer].query_heads if lent.keys.shape[1] > 1 else 1
        seen = Visibility(lent.keys, places, heads, self._window(index), own=own)
        return {**here, "attention_mask": seen.mask(self.implementation, hidden.dtype)}

    def _token_axis(self, hidden: Tensor) -> int:
        """The axis of the tokens in hidden states, which follows that of the rows."""
        return self._streams_axis if hidden.ndim == 4 else 1

    def _check_tokens(self, module: nn.Module, hidden: Tensor) -> None:
        """Check that the first layer gets a hidden state for each token and no other.

        Several streams of them stand before the rows, or behind the tokens.
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
        """The arguments of a recurrent layer; see `_valid_here`."""
        valid = self._valid_here(hidden)
        # A layer's convolutions may have a name of their own for it.
        own = dict.fromkeys({"conv_mask"} & kwargs.keys(), valid)
        return {**kwargs, **own, "attention_mask": valid}

    def _valid_here(self, hidden: Tensor) -> Tensor | None:
        """The mask ``[batch, len]`` of a state, which tells tokens from padding; None without.

        Raises:
            UnsupportedModelError: See `check_states_skip_nothing`.
        """
        if not self._padded:
            return None
        if self._looked_at is not self.new_valid:  # once for all layers that the same tokens reach
            check_states_skip_nothing(self.new_valid, self._started)
            self._looked_at, self._has_padding = self.new_valid, not bool(self.new_valid.all())
        return self.new_valid.to(hidden.device).long() if self._has_padding else None

    def _reaching(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments for the tokens that reach the layer."""
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
            # Nothing held and nothing dropped: the model's own mask is right, but for windows,
            # which it measures in columns, and where it was made before columns were moved.
            return kwargs
        mask = self._mask(index, hidden, self._own_block(kwargs))
        if not self.layers[index].shows_queries and isinstance(mask, Tensor):
            mask = mask.expand(hidden.shape[0], -1, -1, -1)  # some check its shape
            self._check_own_window(index)
        return {**kwargs, "attention_mask": mask}

    def _check_own_window(self, index: int) -> None:
        """Check that a layer that counts its window in columns has no padding between tokens.

        Columns are no farther apart than positions then, so that it hides nothing from the mask.
        """
        behind = not self.acts and self.layers[index].kept_len and self._window(index) is not None
        if behind and not bool(self.new_valid.all()):
            raise UnsupportedModelError(
                f"rows must not be padded behind what was read before where layers, as layer "
                f"{index}, count their window in columns; give rows of one length, or one row at "
                "a time"
            )

    def _own_block(self, kwargs: dict[str, Any]) -> Tensor | None:
        """What a layer's own mask says of the forward's tokens, where it is not order alone."""
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
            self._own_blocks[id(mask)] = mask, block  # the mask too: its id shall not come again
        return self._own_blocks[id(mask)][1]

    def _own_visibility(self, block: Tensor | None, positions: Tensor) -> OwnVisibility | None:
        """For a layer's keys, whose ``positions`` are ``[batch, 1 or kv_heads, key_len]``."""
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
        """The layer's sliding window, if it is shorter than the context.

        Flash attention measures windows in slots, so that there its layers must hold all of theirs.
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
            # Stable: what is no padding keeps its order.
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
            # Heads may hold different tokens, which shows where some are padding, or too far
            # away; elsewhere what is not new lies before all queries.
            if not (layer.ragged or self._moved is not None or window is not None):
                positions = positions[:, :1]
            elif not layer.shows_queries and bool((positions == positions[:, :1]).all()):
                positions = positions[:, :1]  # some take one mask for all heads
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
        """Of tokens behind a prompt: they see what is held of it, and a window."""
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
        """Positions ``[batch, kv_heads, key_len]`` of all keys that the layer sees."""
        if self._combined is not None:
            return self._combined.to(device).expand(-1, kv_heads, -1)
        new = self.new_positions.to(device)[:, None].expand(-1, kv_heads, -1)
        held = layer.positions
        return new if held is None else torch.cat([held.expand(-1, kv_heads, -1), new], dim=2)

    # Inside its attention.

    def columns(self, index: int) -> Columns | None:
        """Where a layer's attention is to think that queries and keys stand, while it runs.

        None where that is what the layer holds, before anything was dropped or evicted.
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
        """All keys and values that the layer's attention is to see, with the new ones."""
        layer = self.layers[index]
        self._updated.add(index)
        if self._packed:
            self._pending = Unpacked.pair(layer.append_packed(keys, values))
            return self._pending
        keys, values = layer.append(keys, values, self._before, self.missing)
        if isinstance(layer, IndexedLayer):
            layer.attend_to(keys)
        if self._temperatures[index] is not None or self._told is not None:
            self._pending = keys, values  # its attention function is to be called from here
        return keys, values

    def update_index(self, index: int, keys: Tensor) -> Tensor:
        """All index keys that the layer's indexer is to see, with the new ones."""
        layer = self.layers[index]
        assert isinstance(layer, IndexedLayer)
        return layer.append_index(keys, new_places(self.layers, self._slots))

    def note_state(self, index: int) -> None:
        """A layer reads or writes its state."""
        self._updated.add(index)

    def waits_for_queries(self) -> bool:
        """Whether an attention function is still to come."""
        return self._pending is not None

    def waits_for(self, keys: Tensor, *, own: bool) -> bool:
        """Whether the attention function that got ``keys`` is one that is still to come.

        A module with latent attention makes them of what was handed out, each of one token.

        Args:
            keys: The function's.
            own: Whether the layer's own module calls it.
        """
        if self._pending is None:
            return False
        given = self._pending[0]
        alike = (keys.shape[0], keys.shape[-2]) == (given.shape[0], given.shape[-2])
        return keys is given or (own and alike)

    def at_own_positions(self, index: int, queries: Tensor) -> Tensor:
        """A layer's queries, where it has counted other positions for them than their own."""
        temperature = self._temperatures[index]
        if temperature is None:
            return queries
        return temperature.corrected(queries, self._before.seen, self._places)

    def before_attention(self, index: int, inputs: AttentionInputs) -> None:
        """The layer's queries are known, its attention is not computed yet."""

    def attend(
        self, attend: Attend, module: nn.Module, query: Tensor, *others: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Call the module's attention function, or compute what it would of what is packed."""
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
            # From positions with gaps it would infer several sequences in one row.
            kwargs.pop("position_ids", None)
        if self._told is not None:
            assert self._inside is not None
            layer = self.layers[self._inside]
            keys = self._positions(layer, layer.choices, query.device)
            places = self.new_positions.to(query.device)
            kwargs = self._told.taken(kwargs, places, keys, query.shape[1])
        return attend(module, query, *others, **kwargs)

    def observe(self, index: int, inputs: AttentionInputs) -> None:
        """The layer has attended."""
        self._pending = None

    # After a layer, and after the last.

    def leave_layer(self, index: int, output: Any) -> Any:
        """The layer's output for the tokens that go on."""
        return output

    def finish(self) -> SeenTokens:
        """Every layer is done: the tokens seen now.

        Raises:
            UnsupportedModelError: A layer did not use the cache, as with gradient checkpointing.
        """
        layers = enumerate(self.layers)
        spared = EmptyLayer, CrossLayer  # the second is left out where there is no image
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
        """The decoder's output in the order of the input's columns; see `InputOrder`."""
        order = InputOrder(self.tokens, self._order_of_columns, self.propagated, self._attended)
        return order.restored(output)
