"""What a cache knows of the tokens it has seen, whatever became of their keys and values."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor


@attrs.frozen(eq=False)
class SeenTokens:
    """The tokens of every row that the model has read so far; a new one is made at each forward.

    A column is one step of the batch's input; a row's position counts its own tokens only, so a
    left-padded row has the positions it would have alone.

    Args:
        valid: ``[batch, seen]`` bool, False on padding.
        lengths: ``[batch]`` int64, tokens of each row.
        appended: ``[batch, appended_len]`` int64, positions of the tokens read since the policy
            last acted, which every layer holds behind what it kept; -1 on padding.
        padded: Whether any column is padding in any row.
    """

    valid: Tensor
    lengths: Tensor
    appended: Tensor
    padded: bool

    @staticmethod
    def none(batch: int, device: torch.device) -> SeenTokens:
        """No token seen yet."""
        return SeenTokens(
            valid=torch.empty(batch, 0, dtype=torch.bool, device=device),
            lengths=torch.zeros(batch, dtype=torch.int64, device=device),
            appended=torch.empty(batch, 0, dtype=torch.int64, device=device),
            padded=False,
        )

    @property
    def batch(self) -> int:
        """Rows."""
        return self.valid.shape[0]

    @property
    def seen(self) -> int:
        """Columns, padding included: what Transformers calls the sequence length of a cache."""
        return self.valid.shape[1]

    def positions_of(self, new_valid: Tensor) -> Tensor:
        """Positions ``[batch, new_len]`` of the next tokens; -1 where ``new_valid`` is False."""
        positions = self.lengths[:, None] + new_valid.cumsum(dim=1) - 1
        return positions.masked_fill(~new_valid, -1)

    def extended(
        self, positions: Tensor, columns: Tensor, *, padded: bool, acts: bool
    ) -> SeenTokens:
        """With the next tokens.

        Args:
            positions: ``[batch, new_len]`` int64, in the order the layers hold them.
            columns: ``[batch, new_len]`` bool, in the order of the input.
            padded: Whether any column is padding.
            acts: Whether the policy acts on them; then nothing counts as appended.
        """
        return SeenTokens(
            valid=torch.cat([self.valid, columns], dim=1),
            lengths=self.lengths + columns.sum(dim=1),
            appended=(positions[:, :0] if acts else torch.cat([self.appended, positions], dim=1)),
            padded=self.padded or padded,
        )

    def without_last(self, count: int) -> SeenTokens:
        """Without the last ``count`` columns, which must have been appended."""
        keep = self.seen - count
        return SeenTokens(
            valid=self.valid[:, :keep],
            lengths=self.lengths - self.valid[:, keep:].sum(dim=1),
            appended=self.appended[:, : self.appended.shape[1] - count],
            padded=self.padded,
        )

    def with_padding(self, valid: Tensor) -> tuple[SeenTokens, Tensor]:
        """Declare tokens already seen to be padding, such as those after a row's end of text.

        Args:
            valid: ``[batch, seen]`` bool, False also where `self.valid` is.

        Returns:
            The tokens that are left, and ``[batch, seen]`` int64 that maps a position before to
            the position after, -1 for those that are padding now.
        """
        before = (self.valid.cumsum(dim=1) - 1).masked_fill(~self.valid, 0)
        after = (valid.cumsum(dim=1) - 1).masked_fill(~valid, -1)
        moved = torch.full_like(before, -1)
        # A padded column would write to position 0 as well: let it write to a column of its own.
        spare = torch.cat([moved, moved[:, :1]], dim=1)
        spare.scatter_(1, before.masked_fill(~self.valid, self.seen), after)
        tokens = SeenTokens(valid, valid.sum(dim=1), self.appended, padded=True)
        return tokens, spare[:, : self.seen]
