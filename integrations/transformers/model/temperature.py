"""Queries that a model scales by how many tokens its cache has seen, not by their positions."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor


@attrs.frozen
class Temperature:
    """Attention whose queries grow with the logarithm of their position (arXiv 2501.19399).

    A query at position ``p`` is scaled by ``1 + scale * log(1 + floor((p + 1) / floor))``. Models
    that do so count a forward's tokens from those that the cache has seen, padding among them, so
    that what is padded, or comes after dropped tokens, is scaled for a position it does not have.

    Args:
        scale: See above.
        floor: Likewise, in tokens.
    """

    scale: float
    floor: float

    @staticmethod
    def of(attention: Any) -> Temperature | None:
        """That of an attention module which counts by itself; None where it has none."""
        counts = getattr(attention, "attn_temperature_tuning", False)
        if not counts or getattr(attention, "use_rope", True):
            return None
        return Temperature(float(attention.attn_scale), float(attention.floor_scale))

    def corrected(self, queries: Tensor, counted: int, places: Tensor) -> Tensor:
        """Queries as they are at their own positions.

        Args:
            queries: ``[batch, query_heads, query_len, head_dim]``, scaled by the model.
            counted: The position for which it has scaled the first.
            places: ``[batch or 1, query_len]`` int64, their own positions.
        """
        taken = torch.arange(counted, counted + queries.shape[2], device=queries.device)
        change = self._at(places.to(queries.device)) / self._at(taken)
        return (queries * change[:, None, :, None]).to(queries.dtype)

    def _at(self, places: Tensor) -> Tensor:
        return torch.log1p(torch.floor((places.float() + 1) / self.floor)) * self.scale + 1
