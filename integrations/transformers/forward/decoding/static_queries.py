"""The last decoded queries in a buffer of a fixed size, written by what `generate` may compile."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from kvpolicy.decoding import DecodingEviction
from kvpolicy.integrations.transformers.state.observed import Observed


@attrs.define(eq=False)
class StaticQueries:
    """A ring that a layer's attention writes its queries into, one token at a time.

    Args:
        queries: ``[batch, query_heads, capacity, head_dim]``.
        slot: ``[1]`` int64: where the token at hand goes; set between two steps, one for all layers
            on a device.
    """

    queries: Tensor
    slot: Tensor

    @staticmethod
    def like(
        keys: Tensor, query_heads: int, decoding: DecodingEviction, slot: Tensor
    ) -> StaticQueries:
        """A ring for a layer with keys ``[batch, kv_heads, ..., head_dim]``."""
        asked = decoding.num_queries
        # One more than is asked for: the last token may be taken back.
        capacity = decoding.every if asked is None else asked + 1
        batch, _, _, head_dim = keys.shape
        return StaticQueries(keys.new_zeros(batch, query_heads, capacity, head_dim), slot)

    @property
    def capacity(self) -> int:
        """Queries that it can hold."""
        return self.queries.shape[2]

    def write(self, queries: Tensor, mask: Tensor, values: Tensor | None) -> None:
        """Write those of one token; see `QueryRing.write`."""
        self.queries.index_copy_(2, self.slot, queries)

    def load(self, observed: Observed) -> None:
        """Begin with what a layer remembers."""
        count = min(observed.count, self.capacity)
        self.queries.fill_(torch.nan)  # until they are written
        if count and observed.queries is not None:
            self.queries[:, :, :count] = observed.queries[:, :, observed.count - count :]

    def read(self, begun: int, steps: int, end: int, observed: Observed) -> Observed:
        """What the layer remembers now.

        Args:
            begun: Queries that it began with.
            steps: Tokens since.
            end: Columns seen.
            observed: What the layer remembered when it began.
        """
        written = begun + steps
        count = min(written, self.capacity)
        slots = torch.arange(written - count, written, device=self.queries.device) % self.capacity
        queries = self.queries.index_select(2, slots)
        return Observed(queries if count else None, end, observed.carried)
