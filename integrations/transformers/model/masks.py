"""Make attention masks by position, for layers that hold only part of the context.

Each attention implementation of Transformers needs its own form: eager a tensor that is added, sdpa
a bool tensor, flex_attention a `BlockMask`. Flash attention gets only the tokens that are not
padding, since the order of the keys alone decides what its queries see.
"""

from __future__ import annotations

from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from kvpolicy.errors import UnsupportedModelError

FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
# The attention implementations whose form of mask is known here, which are the supported ones.
IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention", *FLASH)
# The implementations whose masks are tensors with an entry for every query and key.
DENSE = ("eager", "sdpa")

Mask = Tensor | BlockMask | None


Places = TypeVar("Places", Tensor, int)


class Chunk(int):
    """The length of attention chunks, in a field that usually holds a sliding window.

    A token then sees the tokens of its own chunk. Chunks begin at multiples of their length.
    """


def first_seen(places: Places, window: int) -> Places:
    """Return the first place that a token at ``places`` sees through its window or chunk."""
    return places - places % window if isinstance(window, Chunk) else places - window + 1


@attrs.frozen(eq=False)
class Spans:
    """The places that each new token sees by the model's own mask, if this mask is not causal.

    An example is an image whose tokens see each other. ``first`` and ``last`` are the first and the
    last place that each query sees, ``[batch, query_len]`` int64.
    """

    first: Tensor
    last: Tensor

    @staticmethod
    def of(mask: Any, columns: Tensor, order: Tensor | None, places: Tensor) -> Spans | None:
        """Read a layer's own mask; return None if it is causal among the new tokens, or unreadable.

        ``columns`` ``[batch, new_len]`` are False on padding. ``order`` is the column that comes to
        each place, None to keep the order; ``places`` are the tokens' places then, -1 on padding.
        """
        new_len = columns.shape[1]
        if not isinstance(mask, Tensor) or mask.ndim != 4 or mask.shape[2] != new_len:
            return None
        block = mask[:, 0, :, -new_len:]
        block = block if block.dtype == torch.bool else block > torch.finfo(block.dtype).min / 2
        # A padded query may see anything.
        if not bool((block.triu(1) & columns.to(block.device)[:, :, None]).any()):
            return None
        if order is not None:
            order = order.to(block.device)
            block = block.expand(order.shape[0], -1, -1)
            block = block.gather(1, order[:, :, None].expand(-1, -1, new_len))
            block = block.gather(2, order[:, None, :].expand(-1, new_len, -1))
        return Spans._within(block, places.to(block.device))

    @staticmethod
    def everything(places: Tensor) -> Spans:
        """Return the spans of tokens at ``places`` ``[batch, new_len]`` that all see each other."""
        new_len = places.shape[1]
        return Spans._within(places.new_ones(1, new_len, new_len, dtype=torch.bool), places)

    @staticmethod
    def _within(block: Tensor, places: Tensor) -> Spans:
        """Return the spans of a mask ``[batch or 1, new_len, new_len]`` between new tokens."""
        keys, seen = places[:, None], block & (places >= 0)[:, None]
        behind = torch.iinfo(places.dtype).max
        return Spans(torch.where(seen, keys, behind).amin(2), torch.where(seen, keys, -1).amax(2))

    def taken(self, slots: Tensor) -> Spans:
        """Return the spans of only the queries in ``slots`` ``[batch, count]``."""
        index = slots.clamp(min=0).to(self.first.device)
        return Spans(self.first.gather(1, index), self.last.gather(1, index))

    def to(self, device: torch.device) -> Spans:
        """Return a copy on a device."""
        return Spans(self.first.to(device), self.last.to(device))


@attrs.frozen(eq=False)
class Visibility:
    """A rule for the keys that a query sees: those up to its place and in its window, no padding.

    Args:
        keys: ``[batch, 1 or kv_heads, key_len]`` int64, places of the keys, -1 on padding.
        queries: ``[batch, query_len]`` int64, places of the queries, -1 on padding.
        query_heads: Number of query heads; each head of ``keys`` has a group of them.
        window: Number of places a query sees, its own included, or its `Chunk`; None for all places
            up to its own.
        own: What the queries see by the model's own mask; None if it is causal.
    """

    keys: Tensor
    queries: Tensor
    query_heads: int
    window: int | None = None
    own: Spans | None = None

    def mask(self, implementation: str, dtype: torch.dtype) -> Mask:
        """Make the attention mask in the form that the attention implementation needs.

        For sdpa it is ``[batch, 1 or query_heads, query_len, key_len]`` bool, True where the query
        sees the key; for eager 0 there and the lowest number elsewhere; for flex_attention a
        `BlockMask`; for flash attention ``[batch, key_len]``, 1 on tokens, or None where all are.
        """
        if self.own is not None and implementation not in DENSE:
            raise UnsupportedModelError(
                f"attn_implementation must be one of {', '.join(DENSE)} where the model's own mask "
                f"lets tokens see later ones, got {implementation!r}; load the model with "
                "attn_implementation='sdpa'"
            )
        if implementation in FLASH:
            return self._tokens()
        if implementation == "flex_attention":
            return self._block_mask()
        visible = self._visible()
        if implementation == "sdpa":
            return visible
        lowest = torch.finfo(dtype).min
        mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        return mask.masked_fill_(~visible, lowest)

    def _visible(self) -> Tensor:
        places = self.keys
        if places.shape[1] > 1:
            places = places.repeat_interleave(self.query_heads // places.shape[1], dim=1)
        keys, queries = places[:, :, None, :], self.queries[:, None, :, None]
        own, last = self.own, queries if self.own is None else self.own.last[:, None, :, None]
        visible = (keys >= 0) & (keys <= last)
        if self.window is not None:
            first = first_seen(queries, self.window)
            if own is not None:
                first = torch.minimum(first, own.first[:, None, :, None])
            visible &= keys >= first
        # A padded query sees everything. Its output is not used, but must be finite: a later weight
        # of 0 times NaN would still be NaN.
        return visible | (queries < 0)

    def _block_mask(self) -> BlockMask:
        batch, heads, key_len = self.keys.shape
        group = self.query_heads // heads
        none = torch.zeros_like(self.queries)
        first = none if self.window is None else first_seen(self.queries, self.window)

        def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            # The kernel passes every row and head, even if one mask is used for all of them.
            row = row if batch > 1 else torch.zeros_like(row)
            own = self.queries[row, query]
            place = self.keys[row, head // group if heads > 1 else torch.zeros_like(head), key]
            seen = (place >= 0) & (place <= own) & (place >= first[row, query])
            return seen | (own < 0)

        each = self.query_heads if heads > 1 else None
        query_len = self.queries.shape[1]
        return create_block_mask(sees, batch, each, query_len, key_len, device=self.keys.device)

    def _tokens(self) -> Tensor | None:
        tokens = self.keys >= 0
        if bool((tokens != tokens[:, :1]).any()):
            raise UnsupportedModelError(
                "heads of a row must hold equally many tokens under flash attention, which has "
                "no mask for each head; load the model with attn_implementation='sdpa' or 'eager'"
            )
        return None if bool(tokens.all()) else tokens[:, 0].long()


def of_picked(mask: Tensor, slots: Tensor) -> Tensor:
    """Restrict a mask to the ``slots`` ``[batch, query_len, count]`` that an indexer has picked."""
    picked = torch.zeros(*slots.shape[:2], mask.shape[3], dtype=torch.bool, device=mask.device)
    return _among(mask, picked.scatter_(2, slots.to(torch.int64), True)[:, None])


def of_picked_blocks(mask: Tensor, blocks: Tensor, size: int, query_heads: int) -> Tensor:
    """Restrict a mask to the blocks of ``size`` keys that an indexer has picked for each query.

    They are ``[batch, heads, query_len, count]``, for each group of query heads; -1 for none.
    """
    key_len = mask.shape[3]
    count = -(-key_len // size)
    picked = torch.zeros(*blocks.shape[:3], count + 1, dtype=torch.bool, device=mask.device)
    picked = picked.scatter_(3, torch.where(blocks < 0, count, blocks), True)[..., :count]
    picked = picked.repeat_interleave(size, dim=3)[..., :key_len]
    return _among(mask, picked.repeat_interleave(query_heads // blocks.shape[1], dim=1))


def _among(mask: Tensor, picked: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return mask & picked
    return mask.masked_fill(~picked, torch.finfo(mask.dtype).min)


def causal_mask(
    key_len: int, query_len: int, implementation: str, dtype: torch.dtype, device: torch.device
) -> Any:
    """Make the mask of the last ``query_len`` of ``key_len`` tokens of one row, without padding."""
    if implementation in FLASH:
        return None
    slots = torch.arange(key_len, device=device)
    seen = Visibility(slots[None, None], slots[None, key_len - query_len :], query_heads=1)
    return seen.mask(implementation, dtype)
