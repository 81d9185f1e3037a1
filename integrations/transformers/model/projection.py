"""The weights by which a layer makes its output of what its heads give."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


def linear_modules(layer: nn.Module) -> Iterator[nn.Module]:
    """The modules of a layer that multiply by a matrix, whatever they hold it in."""
    for module in layer.modules():
        if hasattr(module, "in_features") or isinstance(module, Conv1D):
            yield module


@attrs.frozen(eq=False)
class OutputProjection:
    """A layer's output projection.

    Args:
        module: What is applied to the heads' outputs, side by side.
        query_heads: Heads of this process.
        value_dim: Channels of each head's output.
    """

    module: nn.Module
    query_heads: int
    value_dim: int

    def weight(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """``[query_heads, value_dim, hidden]``: a view of the weights, where they lie plainly.

        Weights that are quantised, adapted or not in memory are read off what the module makes of
        each channel alone, a new tensor.

        Args:
            dtype: Of what the module is given.
            device: Likewise.
        """
        matrix = self._plain()
        if matrix is None:
            count = self.query_heads * self.value_dim
            channels = torch.eye(count, dtype=dtype, device=device)
            with torch.no_grad():
                matrix = self.module(channels) - self.module(channels.new_zeros(1, count))
        return matrix.reshape(self.query_heads, self.value_dim, -1)

    def _plain(self) -> Tensor | None:
        """``[channels, hidden]``; None where the weights do not lie so."""
        weight: Any = getattr(self.module, "weight", None)
        if type(self.module) not in (nn.Linear, Conv1D) or weight.is_meta:
            return None
        weight = weight.detach()
        if hasattr(weight, "to_local"):  # spread over processes: of the heads that are here
            weight = weight.to_local()
        if type(weight) is not Tensor:  # of a class that holds numbers in its own way
            return None
        matrix: Tensor = weight.T if type(self.module) is nn.Linear else weight
        return matrix
