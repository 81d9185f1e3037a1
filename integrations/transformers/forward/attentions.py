"""The attentions that a forward returns, by the columns of the input."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from kvpolicy.integrations.transformers.forward.inputs import take_columns
from kvpolicy.integrations.transformers.state.tokens import SeenTokens


@attrs.define(eq=False)
class AttendedKeys:
    """Which tokens the keys of every layer are while a forward attends to them.

    What a layer holds lies without a gap, and without the padding of the input. Where it holds
    every token, its attentions can be given the columns of the input, as without a cache.

    Args:
        layers: Those that attend; the attentions of others are not returned, or None.
    """

    layers: list[int]
    _positions: dict[int, Tensor] = attrs.field(factory=dict)

    def note(self, index: int, positions: Tensor) -> None:
        """Take note of a layer's keys: their positions ``[batch, kv_heads, key_len]``, or -1."""
        self._positions[index] = positions

    def in_columns(
        self, attentions: tuple[Tensor | None, ...], tokens: SeenTokens, order: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """The attentions with the columns of the input, of layers that hold all of its tokens.

        Args:
            attentions: ``[batch, query_heads, new_len, key_len]`` of every layer, or of those
                that attend.
            tokens: Those seen, the forward's among them.
            order: ``[batch, new_len]``, which column of the input each query is; None where they
                are in its order.

        Returns:
            By layer, ``[batch, query_heads, new_len, seen]``, 0 on padding; as they are where a
            layer has evicted or never got some.
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
    # The column of each position, and one more for what is no token.
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
