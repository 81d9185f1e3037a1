"""Hold the last decoded queries in a fixed buffer, for steps that `generate` may compile."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from kvpolicy.decoding import DecodingEviction
from kvpolicy.integrations.transformers.state.recent_queries import RecentQueries


@attrs.define(eq=False)
class StaticQueries:
    """A ring buffer into which a layer's attention writes each decoded token's queries.

    Args:
        queries: ``[batch, query_heads, capacity, head_dim]``.
        slot: ``[1]`` int64, the slot of the current token; set between two steps, and shared by all
            layers on a device.
    """

    queries: Tensor
    slot: Tensor

    @staticmethod
    def like(
        keys: Tensor, query_heads: int, decoding: DecodingEviction, slot: Tensor
    ) -> StaticQueries:
        """Make a ring buffer for a layer with keys ``[batch, kv_heads, ..., head_dim]``."""
        asked = decoding.num_queries
        # One more than is asked for, since the last token may be removed again.
        capacity = decoding.every if asked is None else asked + 1
        batch, _, _, head_dim = keys.shape
        return StaticQueries(keys.new_zeros(batch, query_heads, capacity, head_dim), slot)

    @property
    def capacity(self) -> int:
        """The number of tokens whose queries fit into the ring buffer."""
        return self.queries.shape[2]

    def write(self, queries: Tensor, mask: Tensor, values: Tensor | None) -> None:
        """Write one token's queries into the ring buffer; see `QueryRing.write`."""
        self.queries.index_copy_(2, self.slot, queries)

    def load(self, observed: RecentQueries) -> None:
        """Fill the ring buffer with the last queries that a layer remembers."""
        count = min(observed.count, self.capacity)
        self.queries.fill_(torch.nan)  # marks unwritten queries
        if count and observed.queries is not None:
            self.queries[:, :, :count] = observed.queries[:, :, observed.count - count :]

    def read(self, begun: int, steps: int, end: int, observed: RecentQueries) -> RecentQueries:
        """Return the queries in the ring buffer, oldest first, as the layer's record.

        Args:
            begun: Number of queries that the ring began with.
            steps: Number of tokens since then.
            end: Number of columns seen.
            observed: The layer's queries and scorer state when the ring began.
        """
        written = begun + steps
        count = min(written, self.capacity)
        slots = torch.arange(written - count, written, device=self.queries.device) % self.capacity
        queries = self.queries.index_select(2, slots)
        return RecentQueries(queries if count else None, end, observed.carried)
