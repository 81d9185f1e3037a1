"""Store the keys and values of one layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.errors import NotAttachedError
from kvpolicy.integrations.transformers.state.layer_contents import LayerContents, LayerFacts
from kvpolicy.integrations.transformers.state.packed import Packed, wastes_slots
from kvpolicy.integrations.transformers.state.recent_queries import NO_QUERIES, RecentQueries
from kvpolicy.integrations.transformers.state.storage import Plain, PlainStorage, Storage, StoredKV
from kvpolicy.integrations.transformers.state.tokens import SeenTokens
from kvpolicy.integrations.transformers.surface import CacheLayerMixin
from kvpolicy.selection import gather_positions, gather_slots

# What layers hold in the precision of the model; states and sums have a precision of their own.
OF_MODELS_DTYPE = ("keys", "values", "queries", "index_keys")


class PolicyLayer(CacheLayerMixin):  # type: ignore[misc]
    """A cache layer that holds the keys and values the policy kept, then those of newer tokens.

    Tensors are replaced, never written to, so that a failed forward can be undone.

    Args:
        storage: How keys and values are held.
        room: Slots for which memory is reserved, behind the slots that the policy keeps.

    Attributes:
        tokens: The tokens that the cache has seen; None before the first forward.
        attends: Whether the layer has keys and values of its own.
        producer: Index of the layer whose keys and values it attends to instead; None if it has its
            own.
        one_choice: Whether all heads keep the same tokens, even if attention gets keys of several
            heads.
        holds_more: Whether the layer may hold more than `contents`; see `beside`.
        plain: Whether the layer holds keys and values of its own, and nothing else.
        indexed: The layer itself, an `IndexedLayer`, if an indexer picks among its keys; else None.
        crossing: The layer itself, a `CrossLayer`, if it attends to images; else None.
        recurrent: The layer itself, a `RecurrentLayer`, if it has a state; else None.
        behind: Takes over what another object has written for the layer; None if there is none.
    """

    attends = True
    one_choice = False
    holds_more = False
    plain = True
    # Of classes of other files, which import this one.
    indexed: Any = None
    crossing: Any = None
    recurrent: Any = None
    producer: int | None = None
    is_sliding = False
    is_compileable = False
    is_croppable = True

    def __init__(self, storage: Storage | None = None, room: int = 0) -> None:
        # The constructor of the base is not called, since it would set keys and values.
        self.storage = PlainStorage() if storage is None else storage
        self.room = room
        self.contents = LayerContents()
        self.facts = LayerFacts()
        self.tokens: SeenTokens | None = None
        self.behind: Callable[[], None] | None = None
        # The keys that `join` returned, and the object that already holds them.
        self._joined: tuple[Tensor, StoredKV] | None = None
        self.is_initialized = False

    def settings(self) -> dict[str, Any]:
        """Return the arguments with which it was made, beside ``storage`` and ``room``."""
        return {}

    def fresh(self) -> PolicyLayer:
        """Return an empty layer with the same settings."""
        return type(self)(self.storage, self.room, **self.settings())

    @property
    def held(self) -> StoredKV | None:
        """The keys and values of the layer; None before the first forward."""
        if self.behind is not None:
            self.behind()
        return self.contents.held

    @held.setter
    def held(self, held: StoredKV | None) -> None:
        was, self.behind = self.contents, None
        kept = was.chosen, was.padded, was.ragged, was.counts, was.observed
        self.contents = LayerContents(held, *kept)

    @property
    def observed(self) -> RecentQueries:
        """The decoded queries and scorer state by which the policy evicts during an answer."""
        return self.contents.observed

    @observed.setter
    def observed(self, observed: RecentQueries) -> None:
        self.contents = attrs.evolve(self.contents, observed=observed)

    @property
    def keys(self) -> Tensor | None:
        """The keys ``[batch, kv_heads, kept_len, head_dim]``; None before the first forward."""
        return None if (held := self.held) is None else held.read()[0]

    @property
    def values(self) -> Tensor | None:
        """The values ``[batch, kv_heads, kept_len, head_dim]``; None before the first forward."""
        return None if (held := self.held) is None else held.read()[1]

    @property
    def positions(self) -> Tensor | None:
        """The position of each slot's token, ``[batch, kv_heads, kept_len]``, -1 on empty slots.

        It has one head if all heads keep the same tokens; None before the first forward.
        """
        chosen = None if self.held is None else self.contents.chosen
        if chosen is None or self.tokens is None:
            return None
        appended = self.tokens.appended.to(chosen.device)
        appended = appended[:, None].expand(-1, chosen.shape[1], -1)
        return torch.cat([chosen, appended], dim=2)

    @property
    def choices(self) -> int:
        """The number of heads of `positions`: all KV heads, or 1 if all keep the same tokens."""
        return 1 if self.contents.chosen is None else self.contents.chosen.shape[1]

    @property
    def kept_len(self) -> int:
        """The number of cache slots that the layer holds for each row and head."""
        return 0 if (held := self.held) is None else held.shape[2]

    @property
    def capacity(self) -> int:
        """The number of cache slots for each row and head that fit into the reserved memory."""
        return 0 if self.held is None else self.held.capacity

    def store(
        self,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        kept: Tensor | None,
        carried: Tensor | None = None,
        *,
        room: int | None = None,
        counts: tuple[int, ...] | None = None,
        whole: bool | None = None,
        storage: Storage | None = None,
    ) -> None:
        """Keep only the chosen slots of the layer's keys and values, and forget decoded queries.

        Args:
            keys: ``[batch, kv_heads, key_len, head_dim]``, as the module gave them to the cache.
            values: See ``keys``.
            positions: ``[batch, kv_heads or 1, key_len]``; 1 if all heads keep the same tokens.
            kept: ``[batch, kv_heads or 1, kept_len]``, -1 on padding; None keeps all slots.
            carried: ``[batch, heads, key_len, state_size]``, the scorer's state; None without one.
            room: Slots to reserve behind the kept slots; None takes the layer's own number.
            counts: For each row, the number of tokens kept in each head; None if heads differ or
                the number is unknown, so that it must be read from the tensors.
            whole: Whether ``kept`` is all slots; None if unknown.
            storage: How they are held; None for the layer's own storage.
        """
        observed = NO_QUERIES
        if self.one_choice:
            positions, kept = positions[:, :1], None if kept is None else kept[:, :1]
        if carried is not None:
            observed = RecentQueries(
                carried=carried if kept is None else gather_slots(carried, kept)
            )
        how: dict[str, Any] = {"counts": counts, "observed": observed, "storage": storage}
        room = self.room if room is None else room
        if kept is None or self._is_whole(keys, positions, kept, whole):
            self._hold(keys, values, positions, room, **how)
        else:
            padded = counts is None or min(counts) < kept.shape[2]
            chosen = gather_positions(positions, kept, padded=padded)
            self._hold(keys, values, chosen, room, kept, **how)
        if self.holds_more:
            self.keep_beside(kept)

    @staticmethod
    def _is_whole(keys: Tensor, positions: Tensor, kept: Tensor, whole: bool | None) -> bool:
        """True if ``kept`` names every slot, so that nothing is evicted; see `store`."""
        if kept.shape[2] != keys.shape[2]:
            return False
        if whole is not None:
            return whole
        everything = torch.arange(keys.shape[2], device=kept.device)
        return torch.equal(kept, torch.where(positions >= 0, everything, -1))

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors that the layer holds, by name; see `hold_tensors`."""
        held, positions = self.held, self.contents.chosen
        if held is None or positions is None:
            return {}
        keys, values = held.read()
        return {"keys": keys, "values": values, "positions": positions, **self.observed.tensors()}

    def hold_tensors(self, tensors: Mapping[str, Tensor], tokens: SeenTokens) -> None:
        """Hold tensors that `tensors` returned, after the forward that ``tokens`` ends with."""
        self.follow(tokens)
        if "keys" in tensors:
            self.load(tensors["keys"], tensors["values"], tensors["positions"], tokens)
            queries, carried, columns = map(tensors.get, ("queries", "carried", "columns"))
            self.observed = RecentQueries(queries, tokens.seen, carried, columns)

    def load(self, keys: Tensor, values: Tensor, chosen: Tensor, tokens: SeenTokens) -> None:
        """Take over keys and values from outside; the policy kept the first ones, at ``chosen``."""
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
        observed: RecentQueries | None = None,
        storage: Storage | None = None,
    ) -> None:
        """Hold only the slots ``kept`` of these keys and values; all slots if ``kept`` is None.

        Without ``kept``, the first slots are those of the positions ``chosen``, and the rest are
        appended tokens.
        """
        storage = self.storage if storage is None else storage
        heads, width = chosen.shape[1:]
        ragged, padded = False, counts is None or min(counts) < width
        of_heads = [[count] * heads for count in counts] if padded and counts is not None else []
        if counts is None:  # one transfer from the device for all counts
            of_heads = (chosen >= 0).sum(dim=2).tolist()
            ragged = any(len(set(row)) > 1 for row in of_heads)
            padded = any(count < width for row in of_heads for count in row)
            counts = None if ragged else tuple(row[0] for row in of_heads)
        if padded and self._packs(chosen, sum(map(sum, of_heads))):
            appended = 0
            if kept is None:
                appended = keys.shape[2] - width
                slots = torch.arange(width, device=chosen.device)
                kept = torch.where(chosen >= 0, slots, -1)
            shares = keys.shape[1] // heads  # more than 1 if all heads keep the same tokens
            each = [count for row in of_heads for count in row for _ in range(shares)]
            held: StoredKV = Packed.of(storage, keys, values, kept, appended, counts=each)
        elif kept is None and self._joined is not None and self._joined[0] is keys:
            held = self._joined[1]
        elif kept is None:
            held = storage.hold(keys, values)
        else:
            held = storage.hold(
                gather_slots(keys, kept, padded=padded), gather_slots(values, kept, padded=padded)
            )
        held = held.with_room(room) if room else held
        observed = self.contents.observed if observed is None else observed
        self.contents = LayerContents(held, chosen, padded, ragged, counts, observed)
        self._joined = self.behind = None
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def _packs(self, chosen: Tensor, tokens: int) -> bool:
        """True if padding rows and heads to one length would waste memory in this layer."""
        # Not where all heads keep the same tokens: there, more than attention reads the tensors
        # held. And not where attention computes keys of more heads from them.
        return not (self.one_choice or self.facts.expands) and wastes_slots(chosen, tokens)

    def choose_once(self) -> None:
        """Store positions only once for all heads, which hold the same tokens so far."""
        if self.contents.chosen is not None:
            self.contents = attrs.evolve(self.contents, chosen=self.contents.chosen[:, :1])

    def move_to(self, device: torch.device, dtype: torch.dtype, tokens: SeenTokens) -> None:
        """Copy all that the layer holds to a device, and keys and queries to a precision."""
        moved = {
            name: each.to(device, dtype if name in OF_MODELS_DTYPE else each.dtype)
            for name, each in self.tensors().items()
        }
        self.hold_tensors(moved, tokens)

    def append(
        self, keys: Tensor, values: Tensor, tokens: SeenTokens, missing: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Append the keys and values of a forward's tokens; return all of the layer's.

        Memory is reserved at once for the ``missing`` tokens that are still to come, these
        included: a buffer that grows is held twice, since the old one is kept for undoing a failed
        forward.
        """
        room = self.room + (0 if keys.requires_grad else missing)
        if self.held is None:  # the first chunk of a first prompt
            empty = tokens.appended[:, None, :0].expand(-1, keys.shape[1], -1).to(keys.device)
            none = (0,) * len(keys)
            self.store(keys[:, :, :0], values[:, :, :0], empty, None, room=room, counts=none)
        elif missing and not keys.requires_grad:
            self.held = self.held.with_room(room)
        assert self.held is not None
        self.held = self.held.appended(keys, values)
        return self.held.read()

    def join(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer's keys and values with new ones at the end, for `store` to choose from.

        The layer holds the new tokens only after `store` has kept some of all slots. They are
        written behind the slots held if there is memory.
        """
        held = self.held
        assert held is not None
        if isinstance(held, Plain) and held.has_room_for(keys, values):
            whole = held.appended(keys, values)
            keys, values = whole.read()
            self._joined = keys, whole
            return keys, values
        held_keys, held_values = held.read()
        return torch.cat([held_keys, keys], dim=2), torch.cat([held_values, values], dim=2)

    def claim(self) -> tuple[Tensor, Tensor]:
        """Return the whole buffers, to which only another object appends until `release`."""
        held = self.held
        if isinstance(held, Packed):
            keys, values = held.read()
            held = Plain.of(keys, values, keys.device)
        assert isinstance(held, Plain)
        self.held = held = held.with_room(self.room)
        return held.claim()

    def release(self) -> None:
        """End `claim`: only this layer appends again, and its slots are packed if that pays."""
        held, chosen = self.held, self.contents.chosen
        if not isinstance(held, Plain):  # slots chosen since, which have memory of their own
            return
        held.release()
        if chosen is not None and self._packs(chosen, int((chosen >= 0).sum())):
            self._hold(*held.read(), chosen, 0)

    def follow(self, tokens: SeenTokens) -> None:
        """Take the new record of the tokens that the cache has read."""
        self.tokens = tokens

    def drop_last(self, count: int) -> None:
        """Remove the last ``count`` appended tokens from the layer."""
        if count and self.held is not None:
            self.held = self.held.first(self.kept_len - count)
            self.observed = self.observed.without_last(count)

    def take_rows(self, rows: Tensor, tokens: SeenTokens) -> None:
        """Make the rows ``rows`` ``[count]`` the new batch; ``tokens`` is their record."""
        held, before = self.held, self.contents
        if held is not None and before.chosen is not None:
            alike = before.counts is not None and len(set(before.counts)) == 1
            self.contents = attrs.evolve(
                before,
                held=held.rows(rows),
                chosen=before.chosen.index_select(0, rows.to(before.chosen.device)),
                counts=before.counts[:1] * len(rows) if before.counts and alike else None,
                observed=before.observed.rows(rows),
            )
        self.follow(tokens)

    def keep_beside(self, kept: Tensor | None) -> None:
        """Keep only the slots ``kept`` of what the layer holds in addition to `contents`."""

    def beside(self) -> Any:
        """Return what the layer holds in addition to `contents`, such as a recurrent state."""
        return None

    def restore(self, contents: LayerContents, beside: Any, tokens: SeenTokens | None) -> None:
        """Return the layer to a recorded state; ``beside`` is what `beside` returned then."""
        self.contents, self.tokens = contents, tokens
        self._joined = self.behind = None
        self.is_initialized = contents.held is not None

    def nbytes(self) -> int:
        """Return the bytes of memory for the layer's keys and values, reserved memory included."""
        return 0 if self.held is None else self.held.nbytes()

    def taken_nbytes(self) -> int:
        """Return the bytes of slots that hold tokens, without reserved memory."""
        return 0 if self.held is None else self.held.taken_nbytes()

    def beside_nbytes(self) -> int:
        """Return the bytes per slot and row of what is held in addition to keys and values."""
        return 0

    def state_nbytes(self) -> int:
        """Return the bytes of a layer's state, whose size is independent of the context."""
        return 0

    # The interface of a cache layer of Transformers.

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing, since `store` brings the layer's first tensors."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Raise an error, since only the cache can tell a prompt from an appended token."""
        raise NotAttachedError("a PolicyLayer is written through PolicyCache.update, not directly")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys the next forward attends to, and how many columns are not stored."""
        return self.kept_len + query_length, self.get_seq_length() - self.kept_len

    def get_seq_length(self) -> int:
        """Return how many columns the cache has read, which may be more than it stores."""
        return 0 if self.tokens is None else self.tokens.seen

    def get_max_length(self) -> int:
        """Return -1, since the layer has no maximum length."""
        return -1

    def reset(self) -> None:
        """Forget all keys, values and decoded queries of the layer."""
        self.restore(LayerContents(), None, None)
