"""Passes on the blocks of tokens that together hold a given share of the saliency."""

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpolicy.checks import check_count, check_rate
from kvpolicy.context import LayerContext
from kvpolicy.interfaces import PropagationPolicy, nearest_layer
from kvpolicy.policies.propagation.shared import as_layers, within
from kvpolicy.selection import compress

# Where layers are left open, they act at these shares of the model's depth.
DEPTHS = (0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
# Shares of the mass are summed as whole numbers of this part: exactly, in whatever order.
UNITS = 1 << 40


@attrs.frozen
class BlockMassPropagation(PropagationPolicy):
    """Passes on the fewest blocks of tokens that together hold a given share of the saliency.

    A layer's new tokens are divided into blocks of ``chunk_size``, counted from the row's first.
    The mass of a block is the sum of its tokens' saliency, averaged over all heads; negative values
    count as 0. Blocks of largest mass go on, as few as together reach the share ``mass`` of the
    whole. Their number depends on the prompt, so that rows of a batch may pass on different
    numbers of tokens. The first and the last tokens always go on, and every token keeps its
    position.

    Args:
        mass: Share of the saliency that goes on, in (0, 1]; 1 passes everything on.
        tsp_layers: Indices of the layers after which tokens are dropped, from 0; None for six
            from a quarter to seven eighths of the model, 7, 11, 15, 19, 23 and 27 of 32, or the
            layers nearest to them that see the whole context.
        chunk_size: Tokens of a block, at least 1.
        protect: First tokens of the row's context that always go on, at least 0.
        window_size: Trailing tokens that always go on, at least 1.

    Raises:
        TypeError: An argument is not of its type.
        ValueError: An argument is out of its range.

    Example:
        >>> sorted(BlockMassPropagation().acting_layers(num_layers=32))
        [7, 11, 15, 19, 23, 27]

    Source: UniPrefill (arXiv 2605.06221). Its code has two versions; this follows the one that
    keeps the block in which the mass is reached, and exactly the first and last tokens. The other
    drops that block, and keeps the first and last tokens in whole blocks.
    """

    paper = "arXiv 2605.06221"
    decides_by_content = True  # the saliency decides how many tokens go on

    mass: float = 0.99
    tsp_layers: tuple[int, ...] | None = attrs.field(
        default=None, converter=as_layers, kw_only=True
    )
    chunk_size: int = attrs.field(default=64, kw_only=True)
    protect: int = attrs.field(default=128, kw_only=True)
    window_size: int = attrs.field(default=128, kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_rate("mass", self.mass)
        check_count("chunk_size", self.chunk_size, minimum=1)
        check_count("protect", self.protect)
        # At least the last token: the next one is predicted from it.
        check_count("window_size", self.window_size, minimum=1)

    @property
    def protected_tail(self) -> int:
        """The number of last tokens that score the others and always go on to later layers."""
        return self.window_size

    @property
    def protected_first(self) -> int:
        """The number of the context's first tokens that always go on to later layers."""
        return self.protect

    def acting_layers(self, num_layers: int) -> frozenset[int]:
        """Return the layers after which tokens are dropped; ValueError if outside the model."""
        if self.tsp_layers is None:
            return frozenset(max(int(num_layers * depth) - 1, 0) for depth in DEPTHS)
        return within("tsp_layers", self.tsp_layers, num_layers)

    def placed(self, num_layers: int, eligible: Sequence[int]) -> PropagationPolicy:
        """Return a copy with unset ``tsp_layers`` set to allowed layers near the default."""
        wanted = self.acting_layers(num_layers)
        if self.tsp_layers is not None or wanted <= set(eligible):
            return self
        nearest = {nearest_layer(layer, eligible) for layer in wanted}
        return attrs.evolve(self, tsp_layers=tuple(sorted(nearest)))

    def layer_rates(self, num_layers: int, context_len: int | None = None) -> list[float]:
        """Return 1 for every layer, an upper bound: the prompt decides how many tokens go on."""
        self.acting_layers(num_layers)
        return [1.0] * num_layers

    def ranking(self, saliency: Tensor, context: LayerContext) -> Tensor:
        """Return each new token's score: the share of saliency that its block of tokens holds."""
        units, blocks = self._masses(saliency, context)
        return units.gather(1, blocks).float() / UNITS

    def propagate(self, saliency: Tensor | None, context: LayerContext) -> Tensor | None:
        """Choose the tokens that go on to the next layer; see `PropagationPolicy.propagate`."""
        assert saliency is not None
        units, blocks = self._masses(saliency, context)
        largest, order = units.sort(dim=1, descending=True, stable=True)
        before = largest.cumsum(dim=1) - largest
        enough = before > units.sum(dim=1, keepdim=True).double() * self.mass
        left_out = torch.zeros_like(enough).scatter_(1, order, enough)
        goes = context.new_valid & ~left_out.gather(1, blocks) | self.protected(context)
        counts = torch.stack([goes.sum(dim=1), context.new_valid.sum(dim=1)]).tolist()
        if counts[0] == counts[1]:
            return None
        return compress(goes, max(counts[0]))

    def _masses(self, saliency: Tensor, context: LayerContext) -> tuple[Tensor, Tensor]:
        """Return each block's summed saliency ``[batch, blocks]``, and the block of each token."""
        means = super().ranking(saliency, context).double().clamp(min=0)
        means = means.masked_fill(~context.new_valid, 0.0)
        new_len = context.new_len
        count = -(-new_len // self.chunk_size)
        slots = torch.arange(count * self.chunk_size, device=means.device)
        padding = new_len - context.new_valid.sum(dim=1, keepdim=True)
        # Blocks begin with each row's first token, so that padding moves to the right.
        at = slots + padding
        moved = pad(means, (0, 1)).gather(1, at.clamp(max=new_len))
        masses = moved.view(-1, count, self.chunk_size).sum(dim=2)
        whole = masses.sum(dim=1, keepdim=True).clamp(min=torch.finfo(masses.dtype).tiny)
        units = (masses / whole * UNITS).round().long()
        places = torch.arange(new_len, device=means.device) - padding
        return units, places.clamp(min=0) // self.chunk_size
