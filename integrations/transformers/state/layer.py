"""What a `PolicyCache` stores for one layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvpolicy.errors import NotAttachedError
from kvpolicy.integrations.transformers.model.parallel import Spread
from kvpolicy.integrations.transformers.model.projection import OutputProjection
from kvpolicy.integrations.transformers.model.rotary import Turns
from kvpolicy.integrations.transformers.model.routing import Scores
from kvpolicy.integrations.transformers.state.observed import Observed
from kvpolicy.integrations.transformers.state.packed import Packed, wastes_slots
from kvpolicy.integrations.transformers.state.storage import Held, Plain, PlainStorage, Storage
from kvpolicy.integrations.transformers.state.tokens import SeenTokens
from kvpolicy.selection import gather_positions, gather_slots

# Keys, values, and positions of what the policy kept, in ascending order; see `PolicyLayer.store`.
Loose = Callable[[], tuple[Tensor, Tensor, Tensor]]
State = tuple[Any, ...]  # what `PolicyLayer.restore` takes; to be read by it alone


class PolicyLayer(CacheLayerMixin):  # type: ignore[misc]
    """The keys and values one layer keeps, then those of the tokens read since.

    Tensors are replaced, never written to, so that a failed forward can be taken back.

    Args:
        storage: How they are held.
        room: Slots to have memory for in advance, behind what the policy keeps.

    Attributes:
        padded: Whether some row or head holds fewer tokens than others.
        ragged: Whether heads of one row do.
        counts: For each row, the tokens that the policy kept in each head, where these are as many;
            None where they are not, or not known.
        spread: How the model's heads of this layer are spread over processes.
        attends: Whether the layer has keys and values of its own.
        producer: The layer whose keys and values it attends to instead; None without such.
        one_choice: Whether tokens are kept for all heads together, whatever attention is given.
        shows_queries: Whether the model's attention shows its queries there.
        observed: What it remembers of an answer, for the policy to choose by while it is decoded.
        scores: How its attention makes scores of products; None before the first forward that a
            policy acts on.
        expands: Whether attention makes keys of more heads of what is held.
        turns: How its keys are turned to positions, where the policy asks.
        projection: What its output is made by, where the policy asks.
    """

    attends = True
    one_choice = False
    producer: int | None = None
    is_sliding = False
    is_compileable = False
    is_croppable = True

    def __init__(self, storage: Storage | None = None, room: int = 0) -> None:
        # Not the base's own, which would set keys and values.
        self.storage = PlainStorage() if storage is None else storage
        self.room = room
        self._held: Held | None = None
        self._loose: Loose | None = None
        # What `join` has shown, and how it is held already.
        self._joined: tuple[Tensor, Held] | None = None
        self.is_initialized = False
        self.padded = False
        self.ragged = False
        self.counts: tuple[int, ...] | None = None
        self.query_heads = 0
        self.spread = Spread()
        self.observed = Observed()
        self.scores: Scores | None = None
        self.expands = False
        self.shows_queries = True
        self.turns: Turns | None = None
        self.projection: OutputProjection | None = None
        self._chosen: Tensor | None = None  # positions of what the policy kept, without appended
        self._tokens: SeenTokens | None = None

    def fresh(self) -> PolicyLayer:
        """A layer like it that holds nothing yet."""
        return type(self)(self.storage, self.room)

    def weight(self, values: Tensor) -> Tensor:
        """As `LayerContext.output_weight`, of the precision and device of values."""
        assert self.projection is not None
        return self.projection.weight(values.dtype, values.device)

    @property
    def held(self) -> Held | None:
        """Its keys and values; None before the first forward."""
        if self._loose is not None:
            self._hold(*self._loose(), room=0)
        return self._held

    @held.setter
    def held(self, held: Held | None) -> None:
        self._held, self._loose = held, None

    def loosen(self, loose: Loose) -> None:
        """Hold what another keeps in an order of its own, until somebody looks."""
        self._held, self._loose = None, loose

    @property
    def keys(self) -> Tensor | None:
        """``[batch, kv_heads, kept_len, head_dim]``, None before the first forward."""
        return None if self.held is None else self.held.read()[0]

    @property
    def values(self) -> Tensor | None:
        """``[batch, kv_heads, kept_len, head_dim]``, None before the first forward."""
        return None if self.held is None else self.held.read()[1]

    @property
    def positions(self) -> Tensor | None:
        """``[batch, kv_heads, kept_len]`` int64 original positions, -1 on slots without a token.

        Of one head where one choice is for all heads, as under latent attention.
        """
        if self.held is None or self._chosen is None or self._tokens is None:
            return None
        appended = self._tokens.appended.to(self._chosen.device)
        appended = appended[:, None].expand(-1, self._chosen.shape[1], -1)
        return torch.cat([self._chosen, appended], dim=2)

    @property
    def choices(self) -> int:
        """Heads of `positions`: every KV head, or 1 where one choice is for all of them."""
        return 1 if self._chosen is None else self._chosen.shape[1]

    @property
    def kept_len(self) -> int:
        """Slots held per row and head."""
        return 0 if self.held is None else self.held.shape[2]

    @property
    def capacity(self) -> int:
        """Slots per row and head that there is memory for."""
        return 0 if self.held is None else self.held.capacity

    def store(
        self,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        kept: Tensor,
        carried: Tensor | None = None,
        *,
        room: int | None = None,
        counts: tuple[int, ...] | None = None,
        whole: bool | None = None,
    ) -> None:
        """Keep some slots of all that the layer sees; no query is remembered then.

        Args:
            keys: ``[batch, kv_heads, key_len, head_dim]``, as attention or, where it expands them,
                as the module gave them to the cache.
            values: Likewise.
            positions: ``[batch, kv_heads or 1, key_len]``; of 1 where one choice is for all heads.
            kept: ``[batch, kv_heads or 1, kept_len]``.
            carried: ``[batch, heads, key_len, carries]``, what a scorer carries for each; None
                for nothing.
            room: Slots to have memory for behind what is kept; the layer's own if None.
            counts: For each row, the tokens kept in each head; None where heads keep unlike numbers
                or that is not known, and is to be looked at.
            whole: Whether that is all there are; None where that is not known.
        """
        self.observed = Observed(carried=None if carried is None else gather_slots(carried, kept))
        room = self.room if room is None else room
        if self._is_whole(keys, positions, kept, whole):
            self._hold(keys, values, positions, room, counts=counts)
        else:
            chosen = gather_positions(positions, kept)
            self._hold(keys, values, chosen, room, kept, counts=counts)

    @staticmethod
    def _is_whole(keys: Tensor, positions: Tensor, kept: Tensor, whole: bool | None) -> bool:
        """Whether all is kept of what a layer sees; see `store`."""
        if kept.shape[2] != keys.shape[2]:
            return False
        if whole is not None:
            return whole
        everything = torch.arange(keys.shape[2], device=kept.device)
        return torch.equal(kept, torch.where(positions >= 0, everything, -1))

    def load(self, keys: Tensor, values: Tensor, chosen: Tensor, tokens: SeenTokens) -> None:
        """Hold what a file has: ``chosen`` are the positions of what the policy kept."""
        self._hold(keys, values, chosen, self.room)
        self.follow(tokens)

    def _hold(
        self,
        keys: Tensor,
        values: Tensor,
        chosen: Tensor,
        room: int,
        kept: Tensor | None = None,
        *,
        counts: tuple[int, ...] | None = None,
    ) -> None:
        """Hold ``kept`` of these; without it the first, at ``chosen``, and what was appended."""
        heads, width = chosen.shape[1:]
        if counts is None:  # one look at all that has to be known
            of_heads = (chosen >= 0).sum(dim=2).tolist()
        else:
            of_heads = [[count] * heads for count in counts]
        self.ragged = any(len(set(row)) > 1 for row in of_heads)
        self.padded = any(count < width for row in of_heads for count in row)
        self.counts = None if self.ragged else tuple(row[0] for row in of_heads)
        if self._packs(chosen, sum(map(sum, of_heads))):
            appended = 0
            if kept is None:
                appended = keys.shape[2] - width
                slots = torch.arange(width, device=chosen.device)
                kept = torch.where(chosen >= 0, slots, -1)
            shares = keys.shape[1] // heads  # of one choice for all heads
            each = [count for row in of_heads for count in row for _ in range(shares)]
            held: Held = Packed.of(self.storage, keys, values, kept, appended, counts=each)
        elif kept is None and self._joined is not None and self._joined[0] is keys:
            held = self._joined[1]
        elif kept is None:
            held = self.storage.hold(keys, values)
        else:
            held = self.storage.hold(gather_slots(keys, kept), gather_slots(values, kept))
        self.held = held.with_room(room)
        self._joined = None
        self._chosen = chosen
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def _packs(self, chosen: Tensor, tokens: int) -> bool:
        """Whether rows and heads are held without padding."""
        # What one choice is for all heads of is read by more than attention, or made keys of.
        return not (self.one_choice or self.expands) and wastes_slots(chosen, tokens)

    def choose_once(self) -> None:
        """Take the positions, which are the same in all heads so far, for those of all heads."""
        if self._chosen is not None:
            self._chosen = self._chosen[:, :1]

    def move_to(self, device: torch.device, tokens: SeenTokens) -> None:
        """Hold the same on a device, where ``tokens`` are as well."""
        self.follow(tokens)
        if self.held is not None and self._chosen is not None:
            keys, values = self.held.read()
            self.load(keys.to(device), values.to(device), self._chosen.to(device), tokens)
            self.observed = self.observed.to(device)

    def append(
        self, keys: Tensor, values: Tensor, tokens: SeenTokens, missing: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Add the tokens of one forward behind what is held, and return all of it.

        Args:
            keys: ``[batch, kv_heads, new_len, head_dim]``.
            values: Likewise.
            tokens: Those seen before.
            missing: How many are to come, these among them, so that there is memory for them at
                once: buffers that grow are held twice, since what a failure goes back to stays. 0
                where that is not known.
        """
        room = self.room + (0 if keys.requires_grad else missing)
        if self.held is None:  # the first chunk of a first prompt
            empty = tokens.appended[:, None, :0].expand(-1, keys.shape[1], -1).to(keys.device)
            none = (0,) * len(keys)
            self.store(
                keys[:, :, :0], values[:, :, :0], empty, empty, room=room, counts=none, whole=True
            )
        elif missing and not keys.requires_grad:
            self.held = self.held.with_room(room)
        assert self.held is not None
        self.held = self.held.appended(keys, values)
        return self.held.read()

    def join(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """All that is held with the tokens of one forward behind; `store` is to keep some of it.

        Where there is memory for them, they are written behind what is held.

        Args:
            keys: ``[batch, kv_heads, new_len, head_dim]``.
            values: Likewise.
        """
        held = self.held
        if held is None:
            return keys, values
        if isinstance(held, Plain) and held.has_room_for(keys, values):
            whole = held.appended(keys, values)
            keys, values = whole.read()
            self._joined = keys, whole
            return keys, values
        held_keys, held_values = held.read()
        return torch.cat([held_keys, keys], dim=2), torch.cat([held_values, values], dim=2)

    def append_packed(self, keys: Tensor, values: Tensor) -> Packed:
        """As `append`, where rows and heads are held without padding; nothing is unpacked."""
        assert self.held is not None
        held = self.held.appended(keys, values)
        assert isinstance(held, Packed)
        self.held = held
        return held

    def claim(self, capacity: int | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values ``[batch, kv_heads, capacity, head_dim]`` with room, to be written to.

        Until `release`, only whoever has claimed them appends, and tells so by `written`.

        Args:
            capacity: Slots of buffers that nobody else holds, so that any slot may be written to;
                None for those there are, with the layer's room behind what is held.
        """
        held = self._padded_alike()
        room = held.with_room(self.room) if capacity is None else held.moved(capacity)
        assert isinstance(room, Plain)
        self.held = room
        return room.claim()

    def move_into(self, keys: Tensor, values: Tensor) -> None:
        """Hold the same in buffers that `claim` has given before, which are claimed again."""
        held = self._padded_alike().into(keys, values)
        self.held = held
        held.claim()

    def _padded_alike(self) -> Plain:
        """What is held, with as many slots for all rows and heads, as for fixed buffers."""
        held = self.held.unpacked() if isinstance(self.held, Packed) else self.held
        assert isinstance(held, Plain)
        return held

    def own(self) -> None:
        """Hold the same in memory that nobody else writes to."""
        if isinstance(self.held, Plain):
            self.held = self.held.moved(self.kept_len)
            self._pack()

    def _pack(self) -> None:
        """Hold without padding what fixed buffers have held with it."""
        if self.held is None or self._chosen is None or isinstance(self.held, Packed):
            return
        if self._packs(self._chosen, int((self._chosen >= 0).sum())):
            self._hold(*self.held.read(), self._chosen, 0)

    def written(self, tokens: SeenTokens) -> None:
        """One more slot of what was claimed is taken; ``tokens`` have been seen then."""
        assert isinstance(self.held, Plain)
        self.held = self.held.written(1)
        self.follow(tokens)

    def release(self) -> None:
        """What was claimed is the layer's own again."""
        if isinstance(self.held, Plain):  # not what was chosen since, in memory of its own
            self.held.release()
            self._pack()

    def follow(self, tokens: SeenTokens) -> None:
        """Learn which tokens have been seen now."""
        self._tokens = tokens

    def drop_last(self, count: int) -> None:
        """Take back the last ``count`` appended slots."""
        if count and self.held is not None:
            self.held = self.held.first(self.kept_len - count)
            self.observed = self.observed.without_last(count)

    def take_rows(self, rows: Tensor, tokens: SeenTokens) -> None:
        """Continue with the rows ``[count]`` of the batch, whose tokens are ``tokens``."""
        if self.held is not None and self._chosen is not None:
            self.held = self.held.rows(rows)
            self._chosen = self._chosen.index_select(0, rows.to(self._chosen.device))
            self.observed = self.observed.rows(rows)
            alike = self.counts is not None and len(set(self.counts)) == 1
            self.counts = self.counts[:1] * len(rows) if self.counts and alike else None
        self.follow(tokens)

    def state(self) -> State:
        """All that `restore` needs to bring the layer back to this moment."""
        held = self.held  # first: what is loose is counted as it is held
        counts = self.padded, self.ragged, self.counts
        return held, self._chosen, counts, self._tokens, self.observed

    def restore(self, state: State) -> None:
        """Bring the layer back to the moment of `state`."""
        self.held, self._chosen, counts, self._tokens, self.observed = state
        self.padded, self.ragged, self.counts = counts
        self._joined = None
        self.is_initialized = self.held is not None

    def nbytes(self) -> int:
        """Bytes of memory behind the keys and values, whole storages."""
        return 0 if self.held is None else self.held.nbytes()

    def taken_nbytes(self) -> int:
        """Those of `nbytes` that are of slots that are taken, not of room for more."""
        return 0 if self.held is None else self.held.taken_nbytes()

    def beside_nbytes(self) -> int:
        """Bytes of what is held of each slot beside its keys and values, in one row."""
        return 0

    def state_nbytes(self) -> int:
        """Bytes of what is held besides, whatever the number of tokens."""
        return 0

    # What Transformers asks of a layer.

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare: `store` brings the first tensors."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Raise: only the cache knows whether these are a prompt's or to be appended."""
        raise NotAttachedError("a PolicyLayer is written through PolicyCache.update, not by itself")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length of the keys a forward will see, and the columns seen but not stored."""
        return self.kept_len + query_length, self.get_seq_length() - self.kept_len

    def get_seq_length(self) -> int:
        """Columns seen, not stored."""
        return 0 if self._tokens is None else self._tokens.seen

    def get_max_length(self) -> int:
        """-1: there is no maximum."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        self.restore(self._nothing())

    def _nothing(self) -> State:
        """The state of a layer that holds nothing."""
        return (None, None, (False, False, None), None, Observed())
