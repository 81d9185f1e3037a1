"""Record which tokens a cache has seen, also tokens whose keys and values are gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.integrations.transformers.model.rotary import GivenPlaces


@attrs.frozen(eq=False)
class SeenTokens:
    """An immutable record of the tokens that a cache has read, row by row; it outlives eviction.

    A column is one step of the batch's input. A position counts only the tokens of its own row, so
    a left-padded row has the same positions as the row without padding.

    Args:
        valid: ``[batch, seen]`` bool, False on padding.
        lengths: ``[batch]`` int64, number of tokens of each row.
        appended: ``[batch, appended_len]`` int64, positions of the tokens read since the policy
            last acted, which every layer holds behind what it kept; -1 on padding.
        acted_ids: ``[batch, seen - appended_len]`` int64, ids of the columns that the policy has
            acted on. They have any value on padding, and -1 where an id is unknown, as for
            embeddings.
        appended_ids: ``[batch, appended_len]`` int64, ids of the columns read since, in the same
            form.
        padded: Whether any column is padding in any row.
        skipped: ``[batch]`` int64, by how much each row's rotary positions are smaller than its
            positions: the number of tokens that restarted prefills left out, or that a ``gapless``
            policy evicted. None if there are none.
        kinds: ``[batch, seen]`` int8, the `TokenKind` of each column; None if all are text.
        places: ``[batch, count, axes]`` int64, see `GivenPlaces`; None if the position ids given
            are the tokens' positions, or if no part of the policy asks for them.
        rows_since: For each row, the number of its tokens since layers last evicted in it, if an
            answer is bounded and rows got different numbers of tokens. None if every column of
            ``appended`` counts in every row, or if answers are not bounded.
    """

    valid: Tensor
    lengths: Tensor
    appended: Tensor
    acted_ids: Tensor
    appended_ids: Tensor
    padded: bool
    skipped: Tensor | None = None
    kinds: Tensor | None = None
    places: Tensor | None = None
    rows_since: tuple[int, ...] | None = None

    @staticmethod
    def none(batch: int, device: torch.device) -> SeenTokens:
        """Make the record of a batch of which nothing was read."""
        none = torch.empty(batch, 0, dtype=torch.int64, device=device)
        return SeenTokens(
            valid=torch.empty(batch, 0, dtype=torch.bool, device=device),
            lengths=torch.zeros(batch, dtype=torch.int64, device=device),
            appended=none,
            acted_ids=none,
            appended_ids=none,
            padded=False,
        )

    @property
    def batch(self) -> int:
        """The number of rows in the batch."""
        return self.valid.shape[0]

    @property
    def seen(self) -> int:
        """The number of input columns that were read, padding included."""
        return self.valid.shape[1]

    @property
    def unbroken(self) -> int:
        """The number of last columns in which no row has padding; reading waits for the device."""
        if not self.padded:
            return self.seen
        return int(self.valid.all(dim=0).flip(0).cumprod(dim=0).sum())

    @property
    def since(self) -> tuple[int, ...]:
        """The number of tokens of each row since layers last evicted while decoding an answer."""
        return self.rows_since or (self.appended.shape[1],) * self.batch

    def due(self, every: int) -> tuple[int, ...]:
        """Return the rows in which layers must evict now, while decoding an answer."""
        return tuple(row for row, count in enumerate(self.since) if count >= every)

    @property
    def ids(self) -> Tensor:
        """The token ids of all columns read, ``[batch, seen]`` int64; see ``acted_ids``."""
        return torch.cat([self.acted_ids, self.appended_ids], dim=1)

    def positions_of(self, new_valid: Tensor) -> Tensor:
        """Return the next tokens' positions in their rows, ``[batch, new_len]``, -1 on padding."""
        positions = self.lengths[:, None] + new_valid.cumsum(dim=1) - 1
        return positions.masked_fill(~new_valid, -1)

    def rotary_positions_of(self, new_valid: Tensor) -> Tensor:
        """Return the rotary positions ``[batch, new_len]`` for the next tokens, 0 on padding."""
        positions = self.positions_of(new_valid)
        if self.skipped is not None:
            positions = positions - self.skipped[:, None]
        return positions.clamp(min=0)

    def extended(
        self,
        positions: Tensor,
        columns: Tensor,
        *,
        ids: Tensor | None = None,
        padded: bool,
        acts: bool,
        skipped: Tensor | None,
        kinds: Tensor | None = None,
        places: Tensor | None = None,
        bounded: bool = False,
    ) -> SeenTokens:
        """Return a copy of the record with the next tokens added.

        Args:
            positions: ``[batch, new_len]`` int64, in the order the layers hold them.
            columns: ``[batch, new_len]`` bool, in the order of the input, as ``ids`` and ``kinds``.
            ids: None if they are unknown.
            padded: Whether any column is padding.
            acts: Whether the policy acts on these tokens; then no token counts as appended.
            skipped: ``[batch]`` int64, how many of these tokens a restart left out, if it did.
            kinds: None if all are text.
            places: ``[axes, batch or 1, new_len]``, their position ids; None if they follow.
            bounded: Whether the answer is bounded, so that the tokens of each row are counted.
        """
        new = torch.full_like(columns, -1, dtype=torch.int64) if ids is None else ids.long()
        since = torch.cat([self.appended_ids, new], dim=1)
        # Joined only where the policy acts: otherwise every decoded token would copy the ids of a
        # long prompt.
        acted = torch.cat([self.acted_ids, since], dim=1) if acts else self.acted_ids
        lengths = self.lengths + columns.sum(dim=1)
        return SeenTokens(
            valid=torch.cat([self.valid, columns], dim=1),
            lengths=lengths,
            appended=(positions[:, :0] if acts else torch.cat([self.appended, positions], dim=1)),
            acted_ids=acted,
            appended_ids=since[:, :0] if acts else since,
            padded=self.padded or padded,
            skipped=_sum(self.skipped, skipped),
            kinds=self._with_kinds(kinds, columns),
            places=self._with_places(places, positions, lengths),
            rows_since=None if acts else self._since_with(columns, bounded and padded),
        )

    def _since_with(self, columns: Tensor, padded: bool) -> tuple[int, ...] | None:
        """Return ``rows_since`` with new columns counted; ``padded`` says if some are padding."""
        if self.rows_since is None and not padded:
            return None
        new = columns.sum(dim=1).tolist() if padded else (columns.shape[1],) * self.batch
        return tuple(map(sum, zip(self.since, new, strict=True)))

    def _with_kinds(self, kinds: Tensor | None, columns: Tensor) -> Tensor | None:
        if kinds is None and self.kinds is None:
            return None
        text = torch.zeros(
            self.batch, self.seen + columns.shape[1], dtype=torch.int8, device=self.valid.device
        )
        for known, start in ((self.kinds, 0), (kinds, self.seen)):
            if known is not None:
                text[:, start : start + known.shape[1]] = known
        return text

    def _with_places(
        self, places: Tensor | None, positions: Tensor, lengths: Tensor
    ) -> Tensor | None:
        if places is None:
            return self.places
        known = self.given_places or GivenPlaces.of_text(self.batch, lengths.device)
        found = known.extended(places, positions, lengths)
        return None if found.counts_tokens else found.table

    @property
    def given_places(self) -> GivenPlaces | None:
        """The position ids given, if they are not the tokens' positions; see ``places``."""
        return None if self.places is None else GivenPlaces(self.places)

    def _places_up_to(self, lengths: Tensor) -> Tensor | None:
        return None if self.places is None else GivenPlaces(self.places).cut(lengths).table

    def settled(self, every: int = 0) -> SeenTokens:
        """Return a copy after the policy has acted on all tokens; none counts as appended."""
        since = tuple(0 if count >= every else count for count in self.since)
        return attrs.evolve(
            self,
            appended=self.appended[:, :0],
            acted_ids=self.ids,
            appended_ids=self.appended_ids[:, :0],
            rows_since=since if any(since) else None,
        )

    def kinds_at(self, positions: Tensor) -> Tensor | None:
        """Return the `TokenKind` of the tokens at ``positions``; None if all are text."""
        if self.kinds is None:
            return None
        # By position: a row's own columns, in their order.
        order = (~self.valid).to(torch.uint8).argsort(dim=1, stable=True)
        kinds = self.kinds.gather(1, order).to(positions.device)
        return kinds.gather(1, positions.clamp(min=0).flatten(1)).view(positions.shape)

    def without_last(self, count: int) -> SeenTokens:
        """Return a copy without the last ``count`` columns, which the policy has not acted on."""
        keep = self.seen - count
        valid, gone = self.valid[:, :keep], self.valid[:, keep:].sum(dim=1)
        since, left = self.rows_since, self.appended.shape[1] - count
        if since is not None:
            since = tuple(own - less for own, less in zip(since, gone.tolist(), strict=True))
        lengths = self.lengths - gone
        return attrs.evolve(
            self,
            valid=valid,
            lengths=lengths,
            places=self._places_up_to(lengths),
            appended=self.appended[:, :left],
            appended_ids=self.appended_ids[:, :left],
            padded=self.padded and not bool(valid.all()),
            kinds=None if self.kinds is None else self.kinds[:, :keep],
            rows_since=since,
        )

    def to(self, device: torch.device) -> SeenTokens:
        """Return a copy of the record with all tensors on a device."""
        return attrs.evolve(self, **self._each(lambda tensor: tensor.to(device)))

    def _each(self, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """Return all tensors among the arguments, by name, each of them changed."""
        found = attrs.asdict(self, recurse=False).items()
        return {name: change(each) for name, each in found if isinstance(each, Tensor)}

    def take_rows(self, rows: Tensor) -> SeenTokens:
        """Return a copy of the record for only the given rows ``[count]`` of the batch."""
        rows = rows.to(self.lengths.device)
        taken, since = self._each(lambda tensor: tensor.index_select(0, rows)), self.rows_since
        taken["padded"] = self.padded and not bool(taken["valid"].all())
        if since is not None:
            taken["rows_since"] = tuple(since[row] for row in rows.tolist())
        return attrs.evolve(self, **taken)

    def with_padding(self, valid: Tensor) -> tuple[SeenTokens, Tensor]:
        """Return a copy in which tokens already read are padding, as after an end of text.

        Tokens remain where ``valid`` is True. Also returns ``[batch, seen]`` int64 that maps an old
        position to the new one, -1 for tokens that are padding now.
        """
        before = (self.valid.cumsum(dim=1) - 1).masked_fill(~self.valid, 0)
        after = (valid.cumsum(dim=1) - 1).masked_fill(~valid, -1)
        moved = torch.full_like(before, -1)
        # A padded column would also write to position 0, so it writes to a spare column.
        spare = torch.cat([moved, moved[:, :1]], dim=1)
        spare.scatter_(1, before.masked_fill(~self.valid, self.seen), after)
        moved = spare[:, : self.seen]
        appended = moved.gather(1, self.appended.clamp(min=0)).masked_fill(self.appended < 0, -1)
        lengths = valid.sum(dim=1)
        tokens = attrs.evolve(
            self,
            valid=valid,
            lengths=lengths,
            appended=appended,
            padded=True,
            places=self._places_up_to(lengths),
        )
        return tokens, moved

    def first_unlike(self, ids: Tensor) -> tuple[int, int] | None:
        """Return row and column of the first token read whose id differs; None if there is none."""
        own = self.ids
        unlike = self.valid & (own >= 0) & (ids[:, : self.seen].to(own.device, own.dtype) != own)
        columns = unlike.any(dim=0)
        if not bool(columns.any()):
            return None
        column = int(columns.to(torch.uint8).argmax())
        return int(unlike[:, column].to(torch.uint8).argmax()), column


def _sum(before: Tensor | None, more: Tensor | None) -> Tensor | None:
    return before if more is None else more if before is None else before + more
