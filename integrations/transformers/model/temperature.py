"""Correct queries that a model scales by the number of tokens seen, not by their positions."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor


@attrs.frozen
class Temperature:
    """Settings of attention whose queries are scaled by the log of position (arXiv 2501.19399).

    A query at position ``p`` is scaled by ``1 + scale * log(1 + floor((p + 1) / floor))``. Such
    models count the tokens of a forward from the tokens that the cache has seen, padding included.
    So a padded token, or one that follows dropped tokens, is scaled for a wrong position.
    """

    scale: float
    floor: float

    @staticmethod
    def of(attention: Any) -> Temperature | None:
        """Read the settings of a module that scales by counted positions; None if it does not."""
        counts = getattr(attention, "attn_temperature_tuning", False)
        if not counts or getattr(attention, "use_rope", True):
            return None
        return Temperature(float(attention.attn_scale), float(attention.floor_scale))

    def corrected(self, queries: Tensor, counted: int, places: Tensor) -> Tensor:
        """Return the queries, rescaled from the positions that the model counted to ``places``.

        The first query's was ``counted``.
        """
        taken = torch.arange(counted, counted + queries.shape[2], device=queries.device)
        change = self._at(places.to(queries.device)) / self._at(taken)
        return (queries * change[:, None, :, None]).to(queries.dtype)

    def _at(self, places: Tensor) -> Tensor:
        return torch.log1p(torch.floor((places.float() + 1) / self.floor)) * self.scale + 1
