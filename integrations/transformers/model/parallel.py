"""Find how heads are spread over processes in a tensor-parallel model of Transformers.

Every process of a tensor-parallel model reads the same batch and computes a share of each layer's
heads. A cache then holds the keys and values of its own process's heads, and chooses for these
heads only. A choice for all heads together goes through `kvpolicy.heads.Heads`.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor, distributed, nn

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.heads import Heads, HeadShare

ALL_HEADS = Heads()


@attrs.frozen(eq=False)
class ProcessHeads(HeadShare):
    """A description of which of a layer's heads this process of a ``group`` computes."""

    group: Any

    def exchange(self, tensor: Tensor) -> list[Tensor]:
        """Gather a tensor from all processes that share the layer; see `HeadShare.exchange`."""
        tensor = tensor.detach().contiguous()
        found = [torch.empty_like(tensor) for _ in range(self.shares)]
        distributed.all_gather(found, tensor, group=self.group)
        return found


@attrs.frozen(eq=False)
class HeadSharding:
    """A description of how a layer's attention heads are spread over processes, if they are.

    ``query_heads`` is the number in the whole layer; None if nothing is spread.
    """

    share: int = 0
    shares: int = 1
    group: Any = None
    query_heads: int | None = None

    @staticmethod
    def of(attention: nn.Module, config: Any, tp_size: int = 1) -> HeadSharding:
        """Find how an attention module's parameters are spread over processes."""
        if not distributed.is_available() or not distributed.is_initialized():
            return HeadSharding()
        from torch.distributed.tensor import DTensor

        meshes = [each.device_mesh for each in attention.parameters() if isinstance(each, DTensor)]
        if not meshes and tp_size == 1:
            return HeadSharding()
        mesh: Any = meshes[0] if meshes else None
        if mesh is not None and mesh.ndim > 1:
            mesh = mesh["tp"] if "tp" in (mesh.mesh_dim_names or ()) else None
        if mesh is None:  # allowed as long as this process computes all heads
            return HeadSharding(shares=tp_size, query_heads=config.num_attention_heads)
        return HeadSharding(
            mesh.get_local_rank(), mesh.size(), mesh.get_group(), config.num_attention_heads
        )

    def heads(self, query_heads: int) -> Heads:
        """Return which heads this process has, by the number of query heads seen in a forward.

        A plan may spread the weights and still bring all heads to every process.
        """
        if self.query_heads is None or query_heads == self.query_heads:
            return ALL_HEADS
        if self.group is None or query_heads * self.shares != self.query_heads:
            raise UnsupportedModelError(
                f"every process must compute all {self.query_heads} query heads of a layer, or an "
                f"equal share of them by parameters that are DTensors on a mesh of one axis or "
                f"with an axis named tp, got {query_heads} heads in one of {self.shares} "
                "processes; load the model with another number of processes or without tensor "
                "parallelism"
            )
        return ProcessHeads(self.share, self.shares, self.group)
