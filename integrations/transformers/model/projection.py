"""Read the weights of a layer's output projection, which combines the outputs of its heads."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor, nn

from kvpolicy.integrations.transformers.surface import Conv1D


@attrs.frozen(eq=False)
class OutputProjection:
    """The output projection of an attention layer, whose weights a scorer may read.

    ``module`` is applied to the concatenated outputs, of ``value_dim`` channels each, of the
    ``query_heads`` heads in this process.
    """

    module: nn.Module
    query_heads: int
    value_dim: int

    def weight(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the projection's weights, by query head: ``[query_heads, value_dim, hidden]``.

        If they are quantised, adapted or not in memory, the module is applied to each channel
        alone.
        """
        matrix = self._plain()
        if matrix is None:
            count = self.query_heads * self.value_dim
            channels = torch.eye(count, dtype=dtype, device=device)
            with torch.no_grad():
                matrix = self.module(channels) - self.module(channels.new_zeros(1, count))
        return matrix.reshape(self.query_heads, self.value_dim, -1)

    def _plain(self) -> Tensor | None:
        """Return the weights ``[channels, hidden]``; None if they are quantised or offloaded."""
        weight: Any = getattr(self.module, "weight", None)
        if type(self.module) not in (nn.Linear, Conv1D) or weight.is_meta:
            return None
        weight = weight.detach()
        if hasattr(weight, "to_local"):  # spread over processes: the part of this process's heads
            weight = weight.to_local()
        if type(weight) is not Tensor:  # of a class with a storage format of its own
            return None
        matrix: Tensor = weight.T if type(self.module) is nn.Linear else weight
        return matrix
