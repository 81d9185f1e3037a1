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
class OwnVisibility:
    """The part of the model's own mask that says which new tokens of a forward see each other.

    It decides among the new tokens of a forward, for example where the tokens of an image see later
    ones. Which held tokens a new token sees is decided by positions.

    Args:
        block: ``[batch, new_len, new_len]`` bool: True if a token (second axis) sees another (third
            axis).
        queries: ``[batch, query_len]`` int64, the columns of the queries in ``block``; -1 on
            padding.
        keys: ``[batch, 1 or kv_heads, key_len]`` int64, the columns of the keys in ``block``; -1 on
            keys that were held before the forward, and on padding.
    """

    block: Tensor
    queries: Tensor
    keys: Tensor

    @staticmethod
    def block_of(mask: Any, columns: Tensor, order: Tensor | None) -> Tensor | None:
        """Return the new tokens' part of a layer's own mask; None if this part is causal.

        Args:
            mask: The layer's mask, ``[batch or 1, 1, new_len, columns]``, bool or added to scores;
                anything else gives None.
            columns: ``[batch, new_len]`` bool, for the mask's last columns, False on padding.
            order: ``[batch, new_len]`` int64, the column that comes to each place; None keeps the
                order.

        Returns:
            ``[batch or 1, new_len, new_len]`` bool; None if the mask is causal.
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
        """Return ``visible`` with the model's own mask in its entries for new keys.

        ``visible`` is ``[batch, 1 or query_heads, query_len, key_len]``.
        """
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
    """A rule for the keys that a query sees: those up to its own place, inside its window.

    Padding is never seen.

    Args:
        keys: ``[batch, 1 or kv_heads, key_len]`` int64, places of the keys, -1 on padding.
        queries: ``[batch, query_len]`` int64, places of the queries, -1 on padding.
        query_heads: Number of query heads; each head of ``keys`` has a group of them.
        window: Number of places a query sees, its own included, or its `Chunk`; None for all places
            up to its own.
        own: The model's own mask of the new tokens, if it is not causal, as where the tokens of an
            image see each other in both directions; None if it is causal.
    """

    keys: Tensor
    queries: Tensor
    query_heads: int
    window: int | None = None
    own: OwnVisibility | None = None

    def mask(self, implementation: str, dtype: torch.dtype) -> Mask:
        """Make the attention mask in the form that the attention implementation needs.

        Args:
            implementation: One of `IMPLEMENTATIONS`.
            dtype: Dtype of the layer, for masks that are added to scores.

        Returns:
            For sdpa ``[batch, 1 or query_heads, query_len, key_len]`` bool, True where the query
            sees the key; for eager 0 there and the lowest number elsewhere; for flex_attention a
            `BlockMask`; for flash attention ``[batch, key_len]``, 1 on tokens, or None where all
            are.

        Raises:
            UnsupportedModelError: The heads of a row see different keys under flash attention, or
                the model's own mask is not causal under flash attention or flex_attention.
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
            visible &= keys >= first_seen(queries, self.window)
        if self.own is not None:
            visible = self.own.over(visible, self.query_heads)
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
    """Restrict a mask to the keys that an indexer has picked for each query.

    Args:
        mask: ``[batch or 1, 1, query_len, key_len]``, bool or to be added.
        slots: ``[batch, query_len, count]`` int, the slots of the picked keys.
    """
    picked = torch.zeros(*slots.shape[:2], mask.shape[3], dtype=torch.bool, device=mask.device)
    picked = picked.scatter_(2, slots.to(torch.int64), True)[:, None]
    if mask.dtype == torch.bool:
        return mask & picked
    return mask.masked_fill(~picked, torch.finfo(mask.dtype).min)


def of_picked_blocks(mask: Tensor, blocks: Tensor, size: int, query_heads: int) -> Tensor:
    """Restrict a mask to the blocks of keys that an indexer has picked for each query.

    Args:
        mask: ``[batch or 1, 1, query_len, key_len]``, bool or to be added.
        blocks: ``[batch, heads, query_len, count]`` int, the picked blocks of each group of query
            heads; -1 for none.
        size: Number of keys in a block.
        query_heads: Number of query heads of all groups together.
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
    """Make a causal mask for the last ``query_len`` of ``key_len`` tokens, without padding.

    Returns:
        The mask as from `Visibility.mask`, for a batch of 1; None if the implementation gives the
        right result without one, unless ``spare`` is False.
    """
    if implementation in FLASH or (spare and query_len == 1):
        return None
    if spare and key_len == query_len and implementation == "sdpa":
        return None
    slots = torch.arange(key_len, device=device)
    seen = Visibility(slots[None, None], slots[None, key_len - query_len :], query_heads=1)
    return seen.mask(implementation, dtype)
