"""What a layer remembers of an answer, for its policy to choose by while it is decoded."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from kvpolicy.integrations.transformers.state.tokens import SeenTokens


@attrs.frozen(eq=False)
class Observed:
    """The last decoded queries of a layer, and what a scorer carries for what was kept.

    Nothing changes it: every operation gives another one.

    Args:
        queries: ``[batch, query_heads, count, head_dim]``, after rotary embedding, of the ``count``
            columns before ``end``; None for none.
        end: Columns seen when the last of them was.
        carried: float32 ``[batch, kv_heads, chosen_len, carries]``, for what the policy kept at its
            last choice; see `Scorer.advance`. None for nothing.
    """

    queries: Tensor | None = None
    end: int = 0
    carried: Tensor | None = None

    @property
    def count(self) -> int:
        """Queries remembered."""
        return 0 if self.queries is None else self.queries.shape[2]

    def noted(self, queries: Tensor, end: int, most: int | None) -> Observed:
        """With the queries of one more forward.

        Args:
            queries: ``[batch, query_heads, new_len, head_dim]``.
            end: Columns seen with them.
            most: Queries to be remembered beside those of this forward, which may be taken back;
                None for all.
        """
        new_len = queries.shape[2]
        own = queries if self.queries is None else torch.cat([self.queries, queries], dim=2)
        excess = 0 if most is None else max(own.shape[2] - most - new_len, 0)
        # A copy: attention modules may go on with what they have given.
        kept = own[:, :, excess:].clone() if excess or own is queries else own
        return attrs.evolve(self, queries=kept, end=end)

    def last(self, count: int) -> Observed:
        """With the last ``count`` queries only."""
        if self.queries is None or self.count <= count:
            return self
        return attrs.evolve(self, queries=self.queries[:, :, self.count - count :].clone())

    def without_last(self, count: int) -> Observed:
        """Without the queries of the last ``count`` columns."""
        if self.queries is None:
            return self
        kept = self.queries[:, :, : max(self.count - count, 0)].clone()
        return attrs.evolve(self, queries=kept, end=self.end - count)

    def rows(self, rows: Tensor) -> Observed:
        """With the rows ``[count]`` of the batch."""
        queries, carried = (
            None if each is None else each.index_select(0, rows.to(each.device))
            for each in (self.queries, self.carried)
        )
        return Observed(queries, self.end, carried)

    def to(self, device: torch.device) -> Observed:
        """The same on a device."""
        queries, carried = (
            None if each is None else each.to(device) for each in (self.queries, self.carried)
        )
        return Observed(queries, self.end, carried)

    def in_precision(self, dtype: torch.dtype) -> Observed:
        """With queries of another dtype."""
        return self if self.queries is None else attrs.evolve(self, queries=self.queries.to(dtype))

    def nbytes(self) -> int:
        """Bytes of all of it."""
        tensors = (each for each in (self.queries, self.carried) if each is not None)
        return sum(each.untyped_storage().nbytes() for each in tensors)

    def positions(self, tokens: SeenTokens) -> Tensor:
        """Positions ``[batch, count]`` of the queries' tokens, -1 on padding.

        Args:
            tokens: Those seen, at least up to ``end``.
        """
        valid = tokens.valid[:, : self.end]
        places = (valid.cumsum(dim=1) - 1).masked_fill(~valid, -1)
        return places[:, self.end - self.count :]

    def shown(self, tokens: SeenTokens) -> tuple[Tensor, Tensor]:
        """The queries and their positions, each row's padding before its tokens.

        Args:
            tokens: See `positions`.
        """
        assert self.queries is not None
        places = self.positions(tokens).to(self.queries.device)
        if not tokens.padded:
            return self.queries, places
        order = (places >= 0).to(torch.uint8).argsort(dim=1, stable=True)
        index = order[:, None, :, None].expand(-1, self.queries.shape[1], -1, self.queries.shape[3])
        return self.queries.gather(2, index), places.gather(1, order)
