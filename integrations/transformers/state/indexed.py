"""Store a layer whose indexer picks the keys that each query attends to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kvpolicy.errors import NotAttachedError
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.integrations.transformers.state.layer_contents import LayerContents
from kvpolicy.integrations.transformers.state.storage import Storage, StoredKV
from kvpolicy.integrations.transformers.state.tokens import SeenTokens
from kvpolicy.integrations.transformers.surface import CACHE
from kvpolicy.selection import gather_slots


class IndexedLayer(PolicyLayer):
    """A cache layer that holds keys and values and, for each token, the key that an indexer scores.

    A layer that uses the slots picked by an earlier layer's indexer has no index keys of its own.
    If the model rotates index keys only when it scores them, their position ids are held beside
    them.

    Args:
        storage: How keys and values are held; index keys are not quantised.
        blocks: Whether the indexer picks blocks of slots, and gives its index keys directly to this
            layer.

    Attributes:
        borrows: Whether the layer holds no index keys and was given none in the current forward.
        new_places: ``[axes, batch, new_len]`` int64, the position ids of a forward's tokens. A
            model that rotates index keys late gives them to its first layer of this kind.
        attended: The keys from which the indexer picks in the current forward.
        taking: During a forward, the function that receives the index keys given to the layer.
    """

    one_choice = True
    holds_more = True
    plain = False
    new_places: Tensor | None = None
    taking: Callable[[Tensor], Tensor] | None = None

    def __init__(
        self, storage: Storage | None = None, room: int = 0, *, blocks: bool = False
    ) -> None:
        super().__init__(storage, room)
        self.blocks = blocks
        # Its keys are the index keys ``[batch, 1, kept_len, index_dim]``; its values are their
        # position ids ``[batch, 1, kept_len, axes]``, of width 0 if there are none.
        self.index: StoredKV | None = None
        self._shown: tuple[Tensor, Tensor] | None = None  # of every slot, until `store` keeps some
        self.attended: Tensor | None = None

    @property
    def indexed(self) -> IndexedLayer:  # an attribute there, which costs no call
        return self

    def settings(self) -> dict[str, Any]:
        return {"blocks": self.blocks}

    @property
    def borrows(self) -> bool:
        """True if the layer has no index keys, since it uses another layer's picked slots."""
        return self._shown is None and self.index is None

    def update_index(self, keys: Tensor) -> Tensor:
        """Add index keys ``[batch, 1, new_len, index_dim]``; return all of them."""
        if self.taking is None:
            raise NotAttachedError.with_cache_as(CACHE)
        return self.taking(keys[:, 0])[:, None]

    @property
    def keys(self) -> Tensor | None:
        """The keys in the cache; during a forward, the keys from which the indexer picks."""
        return super().keys if self.attended is None else self.attended

    @property
    def indexer_position_ids(self) -> None:
        """Always None, since a model would otherwise put old position ids before the new ones."""
        return None

    @indexer_position_ids.setter
    def indexer_position_ids(self, places: Tensor) -> None:
        self.new_places = places

    def places(self) -> Tensor | None:
        """The position ids ``[axes, batch, kept_len]`` of the index keys; None if none are held."""
        places = None if self.index is None else self.index.read()[1]
        return None if places is None or not places.shape[3] else places[:, 0].permute(2, 0, 1)

    def show_index(self, new: Tensor, places: Tensor | None, order: Tensor | None) -> Tensor:
        """Return all index keys, old and new, before `store` keeps only the chosen ones.

        ``order`` ``[batch, 1, key_len]`` is the slot that comes to each place; None keeps the
        order.
        """
        keys, beside = _slots(new, places)
        if self.index is not None:
            held_keys, held_beside = self.index.read()
            keys = torch.cat([held_keys, keys], dim=2)
            beside = torch.cat([held_beside, beside], dim=2)
        self._show(keys, beside, order)
        assert self._shown is not None
        return self._shown[0][:, 0]

    def show_as(self, other: IndexedLayer) -> None:
        """Offer to `store` the index keys that a layer of another cache offers."""
        self._shown = other._shown

    def show_held(self, order: Tensor | None) -> None:
        """Offer the index keys in the cache to `store`, which keeps the chosen ones."""
        if self.index is not None:
            self._show(*self.index.read(), order)

    def _show(self, keys: Tensor, beside: Tensor, order: Tensor | None) -> None:
        if order is not None:
            keys, beside = gather_slots(keys, order), gather_slots(beside, order)
        self._shown = keys, beside

    def append_index(self, new: Tensor, places: Tensor | None) -> Tensor:
        """Append the index keys of a forward's tokens; return all index keys of the layer."""
        slots = _slots(new, places)
        if self.index is None:
            self.index = self.storage.beside().hold(*slots)
        else:
            self.index = self.index.appended(*slots)
        return self.index.read()[0][:, 0]

    def keep_beside(self, kept: Tensor | None) -> None:
        shown, self._shown = self._shown, None
        if shown is not None:
            taken = (each if kept is None else gather_slots(each, kept) for each in shown)
            self._hold_index(*taken)

    def tensors(self) -> dict[str, Tensor]:
        index = () if self.index is None else self.index.read()
        return super().tensors() | dict(zip(("index_keys", "index_beside"), index, strict=False))

    def hold_tensors(self, tensors: Mapping[str, Tensor], tokens: SeenTokens) -> None:
        super().hold_tensors(tensors, tokens)
        self.index = None
        if "index_keys" in tensors:
            self._hold_index(tensors["index_keys"], tensors["index_beside"])

    def _hold_index(self, keys: Tensor, beside: Tensor) -> None:
        self.index = self.storage.beside().hold(keys, beside).with_room(self.room)

    def drop_last(self, count: int) -> None:
        if count and self.index is not None:
            self.index = self.index.first(self.kept_len - count)
        super().drop_last(count)

    def take_rows(self, rows: Tensor, tokens: SeenTokens) -> None:
        super().take_rows(rows, tokens)
        if self.index is not None:
            self.index = self.index.rows(rows)

    def beside(self) -> Any:
        return self.index

    def restore(self, contents: LayerContents, beside: Any, tokens: SeenTokens | None) -> None:
        self.index = beside
        self._shown = self.attended = self.new_places = self.taking = None
        super().restore(contents, beside, tokens)

    def follow(self, tokens: SeenTokens) -> None:
        super().follow(tokens)
        self.attended = self.new_places = self.taking = None

    def get_seq_length(self) -> int:
        """Return how many columns were read; during a forward, how many slots are attended to."""
        return super().get_seq_length() if self.attended is None else self.attended.shape[2]

    def nbytes(self) -> int:
        return super().nbytes() + (0 if self.index is None else self.index.nbytes())

    def taken_nbytes(self) -> int:
        return super().taken_nbytes() + (0 if self.index is None else self.index.taken_nbytes())

    def beside_nbytes(self) -> int:
        if self.index is None:
            return 0
        return sum(each.shape[3] * each.element_size() for each in self.index.read())


def _slots(new: Tensor, places: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return new index keys and their position ids with one entry for each slot.

    The position ids are ``[batch, 1, new_len, axes]``, of width 0 without any.
    """
    keys = new[:, None]
    if places is None:
        return keys, keys[..., :0]
    return keys, places.expand(-1, new.shape[0], -1).permute(1, 2, 0)[:, None]
