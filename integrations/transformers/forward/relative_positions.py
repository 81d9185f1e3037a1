"""Support scores that depend on the distance of key and query, though evicted tokens leave gaps.

Some attention modules ask the cache for the columns of their queries and keys, count on from there
without gaps, and give their attention function a bias for every pair; or their model asks, and
gives its layers the distances. Here the answer is all columns seen. From the bias, the entries of
the keys that are held are then taken, head by head. Scorers do not see the bias, and restarts are
refused.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor


@attrs.frozen(eq=False)
class Columns:
    """A record of the input columns that the cache reports to an attention module.

    Keys are said to be in all columns seen, from 0 on. Rows may have different gaps, but a module
    takes one column for the queries of all rows: the largest one of any row.

    Args:
        keys: Number of columns seen, the new ones included.
        queries: ``[query_len]`` int64, each below ``keys``.
    """

    keys: int
    queries: Tensor

    @property
    def query_offset(self) -> Tensor:
        """The numbers to add to 0, 1, ... to get the columns of the queries: ``[query_len]``."""
        return self.queries - torch.arange(len(self.queries), device=self.queries.device)

    @property
    def distances(self) -> Tensor:
        """The columns from each key to each query: ``[query_len, keys]``."""
        return self.queries[:, None] - torch.arange(self.keys, device=self.queries.device)

    def taken(
        self, arguments: dict[str, Any], queries: Tensor, keys: Tensor, query_heads: int
    ) -> dict[str, Any]:
        """Cut the biases for query-key pairs in attention arguments to the keys in the cache.

        ``queries`` and ``keys`` are original positions, -1 on padding.
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
