"""Reorder the attention weights that a forward returns by the columns of the input."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from kvpolicy.integrations.transformers.forward.inputs import take_columns
from kvpolicy.integrations.transformers.state.tokens import SeenTokens


@attrs.define(eq=False)
class AttendedKeys:
    """A record of the positions of the keys that every layer attends to in a forward.

    A layer holds its tokens without gaps, and without the padding of the input. If it holds every
    token, its attention weights can be given by the columns of the input, as without a cache.

    Args:
        layers: Layers that attend; for other layers no attention weights are returned, or None.
    """

    layers: list[int]
    _positions: dict[int, Tensor] = attrs.field(factory=dict)

    def note(self, index: int, positions: Tensor) -> None:
        """Record the positions of the keys that a layer attends to, -1 on padding."""
        self._positions[index] = positions

    def in_columns(
        self, attentions: tuple[Tensor | None, ...], tokens: SeenTokens, order: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Reorder the returned attention weights by input columns, for layers that hold all tokens.

        ``attentions`` are those of every layer, or of those that attend. ``order`` ``[batch,
        new_len]`` is the input column of each query; None for the order of the input. Weights are 0
        on padding. They are unchanged for a layer that has evicted tokens or never got some.
        """
        alone = len(attentions) == len(self.layers)
        return tuple(
            attention
            if attention is None or index not in self._positions
            else _in_columns(attention, self._positions[index], tokens, order)
            for index, attention in zip(
                self.layers if alone else range(len(attentions)), attentions, strict=True
            )
        )


def _in_columns(
    attention: Tensor, positions: Tensor, tokens: SeenTokens, order: Tensor | None
) -> Tensor:
    device = attention.device
    positions, valid = positions.to(device), tokens.valid.to(device)
    lengths = tokens.lengths.to(device)[:, None]
    queries = attention.shape[2]
    whole = (positions >= 0).sum(dim=-1) == lengths
    if not bool(whole.all()) or (order is not None and order.shape[1] != queries):
        return attention
    # The column of each position, and one more column for padding.
    batch, heads, _ = positions.shape
    seen = tokens.seen
    own = (valid.cumsum(dim=1) - 1).masked_fill(~valid, seen)
    columns = torch.full((batch, seen + 1), seen, device=device)
    columns.scatter_(1, own, torch.arange(seen, device=device).expand(batch, -1))
    columns[:, seen] = seen
    flat = positions.masked_fill(positions < 0, seen).flatten(1)
    index = columns.gather(1, flat).view_as(positions)
    index = index.repeat_interleave(attention.shape[1] // heads, dim=1)
    index = index[:, :, None].expand(-1, -1, queries, -1)
    wide = attention.new_zeros(*attention.shape[:3], seen + 1)
    wide = wide.scatter(3, index, attention)[..., :seen]
    if order is None:
        return wide
    return take_columns(wide.transpose(1, 2), order.argsort(dim=1).to(device)).transpose(1, 2)
