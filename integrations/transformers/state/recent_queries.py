"""Remember decoded queries and scorer state, by which a policy evicts during an answer."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.integrations.transformers.state.tokens import SeenTokens


@attrs.frozen(eq=False)
class RecentQueries:
    """The last queries of a layer's decoded tokens, with the scorer's state for its kept tokens.

    It is immutable: every operation returns a new object.

    Args:
        queries: ``[batch, query_heads, count, head_dim]``, after rotary embedding; None for none.
        end: Number of columns seen up to the last of these queries.
        carried: float32 ``[batch, kv_heads, chosen_len, carries]``, the scorer's state for the
            tokens that the policy kept at its last choice; see `Scorer.update`. None if there is
            none.
        columns: ``[batch, count]`` int64, the column of each query, -1 where a row has no query. A
            row with padding among the columns of the answer has queries from earlier columns. None
            if they are the last ``count`` columns before ``end``.
    """

    queries: Tensor | None = None
    end: int = 0
    carried: Tensor | None = None
    columns: Tensor | None = None

    @property
    def count(self) -> int:
        """The number of decoded queries that are remembered."""
        return 0 if self.queries is None else self.queries.shape[2]

    def noted(
        self, queries: Tensor, tokens: SeenTokens, most: int | None, unbroken: int
    ) -> RecentQueries:
        """Return a copy with the queries of one more forward added.

        ``most`` is how many queries to remember before those of this forward, whose tokens may be
        removed again; None for all. ``unbroken`` is the number of last columns that are not padding
        in any row.
        """
        new_len, end = queries.shape[2], tokens.seen
        own = queries if self.queries is None else torch.cat([self.queries, queries], dim=2)
        columns = None
        if self.columns is not None:
            new = torch.arange(end - new_len, end, device=own.device)
            columns = torch.cat([self.columns, new.expand(len(own), -1)], dim=1)
        # A copy, since attention modules may still write to the tensor that they passed.
        whole = RecentQueries(own.clone() if own is queries else own, end, self.carried, columns)
        return whole if most is None else whole.last(most + new_len, tokens, unbroken)

    def last(self, count: int, tokens: SeenTokens, unbroken: int) -> RecentQueries:
        """Return a copy with only the last ``count`` queries of every row."""
        queries, excess = self.queries, self.count - count
        if queries is None or excess <= 0:
            return self
        if self.columns is None and count <= unbroken:
            return attrs.evolve(self, queries=queries[:, :, excess:].clone())
        device = queries.device
        columns = self._columns(len(queries)).to(device)
        real = self.positions(tokens).to(device) >= 0
        order = real.to(torch.uint8).argsort(dim=1, stable=True)[:, excess:]
        columns = columns.masked_fill(~real, -1).gather(1, order)
        mended = bool((columns == torch.arange(self.end - count, self.end, device=device)).all())
        queries = _taken(queries, order)
        return attrs.evolve(self, queries=queries, columns=None if mended else columns)

    def without_last(self, count: int) -> RecentQueries:
        """Return a copy without the queries of the last ``count`` columns."""
        if self.queries is None:
            return self
        end = self.end - count
        if self.columns is not None:
            gone = self.columns >= end
            return attrs.evolve(self, end=end, columns=self.columns.masked_fill(gone, -1))
        kept = self.queries[:, :, : max(self.count - count, 0)].clone()
        return attrs.evolve(self, queries=kept, end=end)

    def without_rows(self, rows: Tensor) -> RecentQueries:
        """Return a copy in which the given rows of the batch have no queries."""
        if self.queries is None:
            return self
        columns = self._columns(len(self.queries)).to(self.queries.device)
        return attrs.evolve(self, columns=columns.index_fill(0, rows.to(columns.device), -1))

    def rows(self, rows: Tensor) -> RecentQueries:
        """Return a copy with only the given rows ``[count]`` of the batch."""
        taken: dict[str, Any] = {
            name: each.index_select(0, rows.to(each.device))
            for name, each in self.tensors().items()
        }
        return attrs.evolve(self, **taken)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors among its arguments, by name."""
        found = {"queries": self.queries, "carried": self.carried, "columns": self.columns}
        return {name: each for name, each in found.items() if each is not None}

    def nbytes(self) -> int:
        """Return the bytes of the queries, the scorer's state and the column indices."""
        return sum(each.untyped_storage().nbytes() for each in self.tensors().values())

    def positions(self, tokens: SeenTokens) -> Tensor:
        """Return the positions ``[batch, count]`` of the queries' tokens, -1 on padding."""
        valid = tokens.valid[:, : self.end]
        places = (valid.cumsum(dim=1) - 1).masked_fill(~valid, -1)
        if self.columns is None:
            return places[:, self.end - self.count :]
        columns = self.columns.to(places.device)
        return places.gather(1, columns.clamp(min=0)).masked_fill(columns < 0, -1)

    def _columns(self, batch: int) -> Tensor:
        """Return the input column of each query, ``[batch, count]`` int64."""
        if self.columns is not None:
            return self.columns
        return torch.arange(self.end - self.count, self.end).expand(batch, -1)

    def shown(self, tokens: SeenTokens) -> tuple[Tensor, Tensor]:
        """Return the queries and their positions, sorted so that padding comes first."""
        assert self.queries is not None
        places = self.positions(tokens).to(self.queries.device)
        if not tokens.padded:
            return self.queries, places
        order = (places >= 0).to(torch.uint8).argsort(dim=1, stable=True)
        return _taken(self.queries, order), places.gather(1, order)


NO_QUERIES = RecentQueries()


def _taken(queries: Tensor, order: Tensor) -> Tensor:
    """Return the queries at the indices ``order`` ``[batch, taken]``."""
    index = order[:, None, :, None].expand(-1, queries.shape[1], -1, queries.shape[3])
    return queries.gather(2, index)
