"""A propagation whose saliency decides how many tokens it passes on, and its reference."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import attrs
import torch
from torch import Tensor

from kvpolicy import LayerContext, PropagationPolicy
from kvpolicy.selection import compress
from tests.reference import SnapKV
from tests.reference.methods import Choice, LayerView
from tests.reference.selection import head_mean


@attrs.frozen
class MassPropagation(PropagationPolicy):
    """Passes on a window, and the top tokens that hold a share of the saliency."""

    layers: tuple[int, ...] = (1,)
    mass: float = 0.9
    window_size: int = 4

    @property
    def decides_by_content(self) -> bool:
        return True

    @property
    def protected_tail(self) -> int:
        return self.window_size

    def acting_layers(self, num_layers: int) -> frozenset[int]:
        return frozenset(self.layers)

    def propagate(self, saliency: Tensor | None, context: LayerContext) -> Tensor | None:
        assert saliency is not None
        protected = self.protected(context)
        new = context.layer.heads.mean(saliency[..., context.key_len - context.new_len :]).double()
        new = new.masked_fill(protected | ~context.new_valid, 0.0)
        order = new.argsort(dim=1, descending=True, stable=True)
        before = new.gather(1, order).cumsum(dim=1) - new.gather(1, order)
        enough = before >= self.mass * new.sum(dim=1, keepdim=True)
        taken = torch.zeros_like(protected).scatter(1, order, ~enough)
        chosen = (taken & context.new_valid & (new > 0)) | protected
        return compress(chosen, int(chosen.sum(dim=1).max()))


@dataclass(frozen=True)
class Mass(SnapKV):
    """A reference method that keeps tokens like SnapKV and drops them like `MassPropagation`."""

    layers: tuple[int, ...] = (1,)
    mass: float = 0.9

    def choose(self, layer: LayerView) -> Choice:
        """Keeps tokens like SnapKV; at an acting layer, also chooses the tokens to pass on."""
        choice = super().choose(layer)
        if layer.layer_idx not in self.layers:
            return choice
        new_len, window = len(layer.new_positions), self.window_size
        means = head_mean([row[-max(new_len - window, 0) :] for row in self._of_new(layer)])
        total, sofar, passed, gap = math.fsum(means), 0.0, [], math.inf
        for index in sorted(range(len(means)), key=lambda index: (-means[index], index)):
            gap = min(gap, abs(sofar / total - self.mass))
            if sofar >= self.mass * total:
                break
            passed.append(index)
            sofar += means[index]
        window_of = range(max(new_len - window, 0), new_len)
        return Choice(choice.kept, [*sorted(passed), *window_of], min(choice.margin, gap))

    def _of_new(self, layer: LayerView) -> Iterator[list[float]]:
        """Yields, for each query head, the saliency of the new tokens before the window."""
        group = len(layer.queries) // len(layer.entries)
        for head, row in enumerate(self.saliency(layer)):
            first = len(layer.entries[head // group]) - len(layer.new_positions)
            yield row[first:]
