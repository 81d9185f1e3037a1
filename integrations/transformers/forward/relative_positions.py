"""Scores that depend on how far a key lies before its query, where keys or queries have gaps.

Some attention modules ask the cache where their queries and keys stand, count both on from there
without gaps, and give their attention function a bias for every pair. Here they are told of all
columns seen; of the bias, what belongs to the keys that are there is taken.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor


@attrs.frozen(eq=False)
class Columns:
    """Where an attention module is told that its queries and keys stand.

    Keys are told to stand in all columns seen, from 0 on. Rows may have unlike gaps, but a module
    takes one column for a query of all rows: no earlier one than it has in any row.

    Args:
        keys: Columns seen, the new ones included.
        queries: ``[query_len]`` int64, each below ``keys``.
    """

    keys: int
    queries: Tensor

    @property
    def query_offset(self) -> Tensor:
        """What a module adds to 0, 1, ... for the columns of its queries: ``[query_len]``."""
        return self.queries - torch.arange(len(self.queries), device=self.queries.device)

    def taken(
        self, arguments: dict[str, Any], queries: Tensor, keys: Tensor, query_heads: int
    ) -> dict[str, Any]:
        """An attention function's arguments, with what they say of pairs for the keys there are.

        Args:
            arguments: By name.
            queries: ``[batch, query_len]`` int64 original positions, -1 on padding.
            keys: ``[batch, 1 or kv_heads, key_len]``, likewise.
            query_heads: Of the layer.
        """
        distances = queries[:, None, :, None] - keys[:, :, None, :]
        columns = self.queries.to(keys.device)[:, None] - distances
        columns = columns.clamp(0, self.keys - 1)
        columns = columns.repeat_interleave(query_heads // columns.shape[1], dim=1)
        pairs = (len(self.queries), self.keys)
        return {
            name: each.gather(-1, columns.expand(*each.shape[:2], -1, -1))
            if isinstance(each, Tensor) and each.ndim == 4 and each.shape[2:] == pairs
            else each
            for name, each in arguments.items()
        }
