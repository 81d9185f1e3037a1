"""Hold keys and values without padding, if rows and heads keep different numbers of tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from kvpolicy.host_counts import on_device
from kvpolicy.integrations.transformers.state.storage import GROWTH_SHARE, Storage, StoredKV


def wastes_slots(positions: Tensor, tokens: int) -> bool:
    """True if padding heads to one length wastes more slots than `GROWTH_SHARE` of them."""
    return positions.numel() - tokens > positions.numel() * GROWTH_SHARE


@attrs.frozen(eq=False)
class Packed(StoredKV):
    """The keys and values of one layer, where each head of each row has its own number of tokens.

    The tokens that a policy keeps are concatenated, one head after the other. Appended tokens are
    held in an ordinary tensor, since every head gets the same number of them, so that appending
    packs nothing again.

    Args:
        storage: How kept and appended tokens are held.
        chosen: The kept tokens, ``[1, 1, total, head_dim]``: row by row, within a row head by head,
            within a head in the order of its tokens.
        lengths: ``[batch * kv_heads]`` int64, the number of kept tokens of each head, on the device
            of attention.
        counts: The same numbers as Python ints.
        width: Number of slots per row and head that the kept tokens have in `shape`, at least the
            largest of ``counts``.
        recent: The tokens appended since, ``[batch, kv_heads, new_len, head_dim]``.
    """

    storage: Storage
    chosen: StoredKV
    lengths: Tensor
    counts: tuple[int, ...]
    width: int
    recent: StoredKV

    @staticmethod
    def of(
        storage: Storage,
        keys: Tensor,
        values: Tensor,
        kept: Tensor,
        appended: int = 0,
        *,
        counts: Sequence[int] | None = None,
    ) -> Packed:
        """Store only the slots ``kept`` of a layer, each head without padding.

        ``kept`` is ``[batch, kv_heads or 1, kept_len]``, padded with -1 on the left. Every head
        also holds the last ``appended`` slots. ``counts`` is how many slots each head of each row
        keeps, row by row; None if it must be read from ``kept``.

        Example:
            >>> from kvpolicy.integrations.transformers import PlainStorage
            >>> keys, kept = torch.ones(1, 2, 5, 4), torch.tensor([[[-1, 2], [0, 4]]])
            >>> held = Packed.of(PlainStorage(), keys, keys, kept)
            >>> held.shape, held.nbytes()  # 3 tokens, not 4
            (torch.Size([1, 2, 2, 4]), 96)
        """
        batch, heads, key_len = keys.shape[:3]
        since, width = key_len - appended, kept.shape[2]
        kept = kept.expand(-1, heads, -1).reshape(batch * heads, width)
        counts = (kept >= 0).sum(dim=1).tolist() if counts is None else counts
        lengths, total = on_device(counts, kept.device), sum(counts)
        # Its size is given, since it would otherwise wait for the device to count.
        each, place = torch.nonzero_static(kept >= 0, size=total).unbind(1)
        at = each // heads, each % heads, kept[each, place]
        chosen = (tensor[at].view(1, 1, total, tensor.shape[3]) for tensor in (keys, values))
        empty = (tensor.new_empty(batch, heads, 0, tensor.shape[3]) for tensor in (keys, values))
        recent = (tensor[:, :, since:] for tensor in (keys, values)) if appended else empty
        held, added = storage.hold(*chosen), storage.hold(*recent)
        return Packed(storage, held, lengths, tuple(counts), width, added)

    @property
    def shape(self) -> torch.Size:
        batch, heads, count, dim = self.recent.shape
        return torch.Size((batch, heads, self.width + count, dim))

    @property
    def widths(self) -> tuple[int, int]:
        return self.recent.widths

    @property
    def dtype(self) -> torch.dtype:
        return self.recent.dtype

    @property
    def capacity(self) -> int:
        return self.width + self.recent.capacity

    @property
    def slots(self) -> int:
        return sum(self.counts) + self.recent.slots

    def parts(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Return keys and values of the kept tokens, then those of the appended; perhaps views.

        They are ``[total, head_dim]`` and ``[batch, kv_heads, new_len, head_dim]``.
        """
        keys, values = self.chosen.read()
        return (keys[0, 0], values[0, 0]), self.recent.read()

    def read(self) -> tuple[Tensor, Tensor]:
        """Return padded copies of all keys and values, 0 on empty slots; see `StoredKV.read`."""
        chosen, recent = self.parts()
        keys, values = (self._unpacked(*each) for each in zip(chosen, recent, strict=True))
        return keys, values

    def _unpacked(self, chosen: Tensor, recent: Tensor) -> Tensor:
        batch, heads, count, dim = recent.shape
        width = self.width
        whole = chosen.new_zeros(batch * heads, width + count, dim)
        if chosen.device.type == "cpu":  # where copying blocks is fastest
            for head, tokens in enumerate(torch.split(chosen, list(self.counts))):
                whole[head, width - len(tokens) : width] = tokens
        else:  # where every call has a cost
            ends = torch.arange(batch * heads, device=chosen.device) * (width + count) + width
            shifts = (ends - self.lengths.cumsum(0)).repeat_interleave(
                self.lengths, output_size=len(chosen)
            )
            places = torch.arange(len(chosen), device=chosen.device) + shifts
            whole.view(-1, dim).index_copy_(0, places, chosen)
        whole = whole.view(batch, heads, width + count, dim)
        whole[:, :, width:] = recent
        return whole

    def appended(self, keys: Tensor, values: Tensor) -> Packed:
        return attrs.evolve(self, recent=self.recent.appended(keys, values))

    def with_room(self, count: int) -> StoredKV:
        return attrs.evolve(self, recent=self.recent.with_room(count))

    def first(self, count: int) -> StoredKV:
        recent = self.recent.first(max(count - self.width, 0))
        cut = max(self.width - count, 0)
        if not cut:
            return attrs.evolve(self, recent=recent)
        counts = [max(each - cut, 0) for each in self.counts]
        return attrs.evolve(self._taken(range(len(counts)), counts, recent), width=self.width - cut)

    def rows(self, rows: Tensor) -> StoredKV:
        heads = self.shape[1]
        taken = [row * heads + head for row in rows.tolist() for head in range(heads)]
        return self._taken(taken, [self.counts[each] for each in taken], self.recent.rows(rows))

    def _taken(self, taken: range | list[int], counts: list[int], recent: StoredKV) -> Packed:
        """Return the first ``counts`` kept tokens of the heads ``row * kv_heads + head``."""
        keys, values = self.chosen.read()
        ends = list(itertools.accumulate(self.counts))
        lengths = torch.tensor(counts, dtype=torch.int64)
        starts = torch.tensor([ends[each] - self.counts[each] for each in taken], dtype=torch.int64)
        shifts = (starts + lengths - lengths.cumsum(0)).repeat_interleave(lengths)
        slots = (torch.arange(sum(counts)) + shifts).to(keys.device)
        chosen = self.storage.hold(keys.index_select(2, slots), values.index_select(2, slots))
        at = self.lengths.device
        return Packed(self.storage, chosen, lengths.to(at), tuple(counts), self.width, recent)

    def nbytes(self) -> int:
        return self.chosen.nbytes() + self.recent.nbytes()

    def taken_nbytes(self) -> int:
        return self.chosen.taken_nbytes() + self.recent.taken_nbytes()
