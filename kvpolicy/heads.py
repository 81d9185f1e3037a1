"""Says whether a layer's heads are all in this process or split over several."""

import abc

import attrs
import torch
from torch import Tensor


@attrs.frozen
class Heads:
    """A layer's attention heads when one process has all of them: no communication is needed.

    Under tensor parallelism each process computes only a share of the heads (`HeadShare`), but all
    processes have to pass on the same tokens. So a part computes everything that concerns all
    heads together by these methods. A choice for one KV head by its own saliency does not need
    them.
    """

    @property
    def share(self) -> int:
        """The index, from 0, of this process's share of the layer's heads."""
        return 0

    @property
    def shares(self) -> int:
        """The number of processes that the layer's heads are split over."""
        return 1

    def mean(self, per_head: Tensor) -> Tensor:
        """Average a tensor over all heads of the layer, across all processes.

        Args:
            per_head: float ``[batch, heads, length]``, the heads of this process; ``length`` is
                the same in all processes.

        Returns:
            ``[batch, length]``, bitwise the same in all processes.

        Example:
            >>> Heads().mean(torch.tensor([[[1.0, 2.0], [3.0, 6.0]]]))
            tensor([[2., 4.]])
        """
        return sum_of_heads(per_head) / per_head.shape[1]

    def gather(self, per_head: Tensor) -> Tensor:
        """Concatenate this process's heads of a tensor with those of all other processes.

        Args:
            per_head: ``[batch, heads, length]``; processes may differ in ``length``.

        Returns:
            ``[batch, all heads, longest]``, filled with 0 (False) on the left; may be ``per_head``.
        """
        return per_head


@attrs.frozen(eq=False)
class HeadShare(Heads, abc.ABC):
    """A layer's attention heads when split equally over processes, as under tensor parallelism.

    All processes have to call the same methods in the same order, as they do when all of them run
    the same policy on the same batch.

    Args:
        share: The index of this process's share, from 0.
        shares: The number of shares.
    """

    share: int
    shares: int

    @abc.abstractmethod
    def exchange(self, tensor: Tensor) -> list[Tensor]:
        """Send a tensor to all processes; return every process's tensor, in process order."""

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
    """Sum ``[..., heads, length]`` over heads in a fixed order, which rounds equal tokens alike.

    Tokens with equal values in all heads, such as neighbours after pooling, get equal sums. A sum
    along another axis than the innermost would add up some columns in a different order.
    """
    if per_head.shape[-2] == 2:  # the sum of two is the same in every order
        return per_head.sum(dim=-2)
    return per_head.transpose(-1, -2).contiguous().sum(dim=-1)
