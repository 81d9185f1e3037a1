"""Applies and undoes a layer's rotary embedding."""

import abc

import attrs
import torch
from torch import Tensor


class RotaryEmbedding(abc.ABC):
    """Interface that applies a layer's rotary embedding to keys and queries, and undoes it.

    Parts that declare `Part.needs_rotary` find it in `LayerInputs.rotary`. Positions are original
    ones, as in `LayerContext.positions`; after a restarted prefill they are those of the second
    pass, without gaps.
    """

    @abc.abstractmethod
    def turned(self, states: Tensor, positions: Tensor) -> Tensor:
        """Apply the rotary embedding to keys or queries at given positions.

        Args:
            states: ``[batch, heads, length, head_dim]``, before rotary embedding.
            positions: int64 ``[batch, heads or 1, length]``; at -1 the result is arbitrary.

        Returns:
            The same shape and dtype, a new tensor.
        """

    @abc.abstractmethod
    def turned_back(self, states: Tensor, positions: Tensor) -> Tensor:
        """Undo the rotary embedding of keys or queries at given positions."""

    def moved(self, states: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """Rotate keys or queries from the positions ``before`` to the positions ``after``."""
        return self.turned(self.turned_back(states, before), after)


@attrs.frozen
class PlainRotary(RotaryEmbedding):
    """Llama's rotary embedding: rotates pairs of channels half a head apart.

    Args:
        head_dim: Channels of a head, an even number.
        theta: The base of the frequencies.

    Example:
        >>> rotary, states = PlainRotary(4), torch.tensor([[[[1.0, 0.0, 0.0, 0.0]]]])
        >>> rotary.turned(states, torch.tensor([[[1]]]))[..., [0, 2]]
        tensor([[[[0.5403, 0.8415]]]])
    """

    head_dim: int
    theta: float = 10000.0

    def turned(self, states: Tensor, positions: Tensor) -> Tensor:
        """Apply the rotary embedding; see `RotaryEmbedding.turned`."""
        return self._turned(states, positions, 1.0)

    def turned_back(self, states: Tensor, positions: Tensor) -> Tensor:
        """Undo the rotary embedding; see `RotaryEmbedding.turned_back`."""
        return self._turned(states, positions, -1.0)

    def _turned(self, states: Tensor, positions: Tensor, sign: float) -> Tensor:
        channels = torch.arange(0, self.head_dim, 2, device=states.device, dtype=torch.float32)
        angles = positions[..., None].float() * self.theta ** (-channels / self.head_dim)
        cos, sin = angles.cos(), sign * angles.sin()
        first, second = states.float().chunk(2, dim=-1)
        both = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        return both.to(states.dtype)
