"""Attention masks by position, for layers whose keys are no longer those of the whole context.

Each attention implementation of Transformers wants its own form: eager a tensor to add, sdpa a bool
tensor, flex_attention a `BlockMask`, flash attention the tokens that are no padding, since what it
sees is decided by the order of the keys alone.
"""

from __future__ import annotations

from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from kvpolicy.errors import UnsupportedModelError

FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
# The forms of mask that are known here, and so the attention implementations that are supported.
IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention", *FLASH)
# Those whose masks are tensors of a number for every query and key.
DENSE = ("eager", "sdpa")

Mask = Tensor | BlockMask | None


Places = TypeVar("Places", Tensor, int)


class Chunk(int):
    """The length of chunks, where it stands in the place of a sliding window's.

    A token then sees those of its own chunk. Chunks begin at multiples of their length.
    """


def first_seen(places: Places, window: int) -> Places:
    """The first place that tokens at ``places`` see through a window, or in their chunk."""
    return places - places % window if isinstance(window, Chunk) else places - window + 1


@attrs.frozen(eq=False)
class OwnVisibility:
    """What a model's own mask says of a forward's tokens among themselves.

    Args:
        block: ``[batch, new_len, new_len]`` bool: whether a token (second axis) sees another.
        queries: ``[batch, query_len]`` int64, the queries' columns in it; -1 on padding.
        keys: ``[batch, 1 or kv_heads, key_len]`` int64, the keys' columns in it; -1 on keys that
            were held before, and on padding.
    """

    block: Tensor
    queries: Tensor
    keys: Tensor

    @staticmethod
    def block_of(mask: Any, columns: Tensor, order: Tensor | None) -> Tensor | None:
        """The block of a layer's own mask, where it lets some token see a later one.

        Args:
            mask: ``[batch or 1, 1, new_len, columns]``, bool or to be added; or anything else.
            columns: ``[batch, new_len]`` bool, False on padding: of the mask's last columns.
            order: ``[batch, new_len]`` int64, the column in each place; None where they keep
                their places.

        Returns:
            ``[batch or 1, new_len, new_len]`` bool; None where order alone decides.
        """
        new_len = columns.shape[1]
        if not isinstance(mask, Tensor) or mask.ndim != 4 or mask.shape[2] != new_len:
            return None
        block = mask[:, 0, :, -new_len:]
        block = block if block.dtype == torch.bool else block > torch.finfo(block.dtype).min / 2
        # A padded query may see anything.
        if not bool((block.triu(1) & columns.to(block.device)[:, :, None]).any()):
            return None
        if order is None:
            return block
        order = order.to(block.device)
        block = block.expand(order.shape[0], -1, -1)
        block = block.gather(1, order[:, :, None].expand(-1, -1, new_len))
        return block.gather(2, order[:, None, :].expand(-1, new_len, -1))

    def over(self, visible: Tensor, query_heads: int) -> Tensor:
        """``visible`` ``[batch, 1 or query_heads, query_len, key_len]``, where it knows better."""
        columns, heads = self.keys, self.keys.shape[1]
        rows = self.queries.clamp(min=0)[:, :, None].expand(-1, -1, self.block.shape[2])
        seen = self.block.expand(rows.shape[0], -1, -1).gather(1, rows)[:, None]
        index = columns.clamp(min=0)[:, :, None, :].expand(-1, -1, rows.shape[1], -1)
        seen = seen.expand(-1, heads, -1, -1).gather(3, index)
        new = (columns >= 0)[:, :, None, :]
        if heads > 1:
            group = query_heads // heads
            seen, new = (each.repeat_interleave(group, dim=1) for each in (seen, new))
        return torch.where(new, seen, visible)


@attrs.frozen(eq=False)
class Visibility:
    """Which keys each query sees: those up to its own place, that are no padding, in its window.

    Args:
        keys: ``[batch, 1 or kv_heads, key_len]`` int64, places of the keys, -1 on padding.
        queries: ``[batch, query_len]`` int64, places of the queries, -1 on padding.
        query_heads: Query heads, of a group for each of ``keys``' heads.
        window: Places a query sees, its own among them, or its `Chunk`; None for all before it.
        reference: ``[batch]`` int64: the place behind the prompt that is seen in spite of the
            window; None where it hides all that is far.
        own: What the model's own mask says of the tokens at hand, where it is not of order alone,
            as where the tokens of an image see each other both ways; None where it is.
    """

    keys: Tensor
    queries: Tensor
    query_heads: int
    window: int | None = None
    reference: Tensor | None = None
    own: OwnVisibility | None = None

    def mask(self, implementation: str, dtype: torch.dtype) -> Mask:
        """The mask in the form that an implementation wants.

        Args:
            implementation: One of `IMPLEMENTATIONS`.
            dtype: The layer's dtype, for masks that are added.

        Returns:
            For sdpa ``[batch, 1 or query_heads, query_len, key_len]`` bool, True where the query
            sees the key; for eager 0 there and the lowest number elsewhere; for flex_attention a
            `BlockMask`; for flash attention ``[batch, key_len]``, 1 on tokens, or None where all
            are.

        Raises:
            UnsupportedModelError: Flash attention cannot see different keys in the heads of a row.
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
        visible = (keys >= 0) & (keys <= queries)
        if self.window is not None:
            near = keys >= first_seen(queries, self.window)
            if self.reference is not None:
                near |= keys < self.reference[:, None, None, None]
            visible &= near
        if self.own is not None:
            visible = self.own.over(visible, self.query_heads)
        # A padded query sees everything: what it yields is never used, but it has to stay finite,
        # since a weight of 0 times NaN would spoil the others.
        return visible | (queries < 0)

    def _block_mask(self) -> BlockMask:
        batch, heads, key_len = self.keys.shape
        group = self.query_heads // heads
        none = torch.zeros_like(self.queries)
        first = none if self.window is None else first_seen(self.queries, self.window)
        reference = none[:, 0] if self.reference is None else self.reference

        def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            # The kernel asks for every row and head, also where the mask is one for all.
            row = row if batch > 1 else torch.zeros_like(row)
            own = self.queries[row, query]
            place = self.keys[row, head // group if heads > 1 else torch.zeros_like(head), key]
            near = (place >= first[row, query]) | (place < reference[row])
            seen = (place >= 0) & (place <= own) & near
            return seen | (own < 0)

        each = self.query_heads if heads > 1 else None
        query_len = self.queries.shape[1]
        return create_block_mask(sees, batch, each, query_len, key_len, device=self.keys.device)

    def _tokens(self) -> Tensor | None:
        tokens = self.keys >= 0
        if bool((tokens != tokens[:, :1]).any()):
            raise UnsupportedModelError(
                "heads of a row must hold as many tokens as each other under flash attention, "
                "which has no mask for each; load the model with attn_implementation='sdpa'"
            )
        return None if bool(tokens.all()) else tokens[:, 0].long()


def of_picked(mask: Tensor, slots: Tensor) -> Tensor:
    """A mask under which queries see only what an indexer has picked for them.

    Args:
        mask: ``[batch or 1, 1, query_len, key_len]``, bool or to be added.
        slots: ``[batch, query_len, count]`` int, of the keys.
    """
    picked = torch.zeros(*slots.shape[:2], mask.shape[3], dtype=torch.bool, device=mask.device)
    picked = picked.scatter_(2, slots.to(torch.int64), True)[:, None]
    if mask.dtype == torch.bool:
        return mask & picked
    return mask.masked_fill(~picked, torch.finfo(mask.dtype).min)


def of_picked_blocks(mask: Tensor, blocks: Tensor, size: int, query_heads: int) -> Tensor:
    """A mask under which queries see only the blocks of keys that an indexer has picked for them.

    Args:
        mask: ``[batch or 1, 1, query_len, key_len]``, bool or to be added.
        blocks: ``[batch, heads, query_len, count]`` int, for groups of query heads; -1 for none.
        size: Keys of a block.
        query_heads: Of all groups.
    """
    key_len = mask.shape[3]
    count = -(-key_len // size)
    picked = torch.zeros(*blocks.shape[:3], count + 1, dtype=torch.bool, device=mask.device)
    picked = picked.scatter_(3, torch.where(blocks < 0, count, blocks), True)[..., :count]
    picked = picked.repeat_interleave(size, dim=3)[..., :key_len]
    picked = picked.repeat_interleave(query_heads // blocks.shape[1], dim=1)
    if mask.dtype == torch.bool:
        return mask & picked
    return mask.masked_fill(~picked, torch.finfo(mask.dtype).min)


def causal_mask(
    key_len: int,
    query_len: int,
    *,
    implementation: str,
    dtype: torch.dtype,
    device: torch.device,
    spare: bool = True,
) -> Any:
    """Mask of the last ``query_len`` of ``key_len`` tokens where no slot is padding.

    Returns:
        As `Visibility.mask`, for a batch of 1; None where the implementation does right without,
        unless ``spare`` is False.
    """
    if implementation in FLASH or (spare and query_len == 1):
        return None
    if spare and key_len == query_len and implementation == "sdpa":
        return None
    slots = torch.arange(key_len, device=device)
    seen = Visibility(slots[None, None], slots[None, key_len - query_len :], query_heads=1)
    return seen.mask(implementation, dtype)
