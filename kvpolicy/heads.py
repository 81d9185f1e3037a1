"""Says whether a layer's heads are all in this process or split over several."""

from __future__ import annotations

import abc

import attrs
import torch
from torch import Tensor


@attrs.frozen
class Heads:
    """The heads of a layer when all of them are in this process.

    Under tensor parallelism a process computes a share of the heads only (`HeadShare`), and all of
    them have to pass on the same tokens. So a part takes what is for all heads together from here;
    what it chooses for a KV head by that head's own saliency needs nothing of it.
    """

    @property
    def share(self) -> int:
        """The index of this process's share of the heads, from 0; shares are equal and in order."""
        return 0

    @property
    def shares(self) -> int:
        """The number of processes that the heads are split over."""
        return 1

    def mean(self, per_head: Tensor) -> Tensor:
        """Average a tensor over all heads of the layer, in every process.

        Args:
            per_head: float ``[batch, heads, length]``, of the heads here; of one length everywhere.

        Returns:
            ``[batch, length]``, to the bit the same in all processes.

        Example:
            >>> Heads().mean(torch.tensor([[[1.0, 2.0], [3.0, 6.0]]]))
            tensor([[2., 4.]])
        """
        return sum_of_heads(per_head) / per_head.shape[1]

    def gather(self, per_head: Tensor) -> Tensor:
        """Concatenate this process's heads with those of all other processes.

        Args:
            per_head: ``[batch, heads, length]``; processes may differ in ``length``.

        Returns:
            ``[batch, all heads, longest]``, filled with 0 (False) on the left; may be ``per_head``.
        """
        return per_head


@attrs.frozen(eq=False)
class HeadShare(Heads, abc.ABC):
    """The heads of a layer when they are split equally over several processes.

    All processes have to call the same methods in the same order, as they do where they all run
    one policy on one batch.

    Args:
        share: Which one, from 0.
        shares: How many there are.
    """

    share: int
    shares: int

    @abc.abstractmethod
    def exchange(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all processes in order; all have one shape and dtype, not bool."""

    def mean(self, per_head: Tensor) -> Tensor:
        """Average a tensor over all heads of the layer; see `Heads.mean`."""
        # Sums are exchanged, not reduced on the way: every process then adds the same numbers in
        # the same order, whatever the collective does.
        sums = torch.stack(self.exchange(sum_of_heads(per_head)))
        return sums.sum(dim=0) / (self.shares * per_head.shape[1])

    def gather(self, per_head: Tensor) -> Tensor:
        """Concatenate the heads of all processes; see `Heads.gather`."""
        batch, heads, length = per_head.shape
        lengths = self.exchange(torch.tensor([length], device=per_head.device))
        missing = max(int(each) for each in lengths) - length
        # Not every backend knows bool.
        sent = per_head.to(torch.uint8) if per_head.dtype == torch.bool else per_head
        padded = torch.cat([sent.new_zeros(batch, heads, missing), sent], dim=2)
        return torch.cat(self.exchange(padded), dim=1).to(per_head.dtype)


def sum_of_heads(per_head: Tensor) -> Tensor:
    """Sum a tensor over heads in a fixed order, so that all tokens round alike.

    Tokens that are equal in all heads, as pooling makes neighbours, stay equal: a sum along any
    other axis than the innermost adds up some columns in another order than the rest.

    Args:
        per_head: float ``[..., heads, length]``.

    Returns:
        ``[..., length]``.
    """
    return per_head.transpose(-1, -2).contiguous().sum(dim=-1)
