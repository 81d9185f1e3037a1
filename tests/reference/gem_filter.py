"""GemFilter: an early layer chooses new tokens, and the prefill restarts on them."""

from dataclasses import dataclass, field

import torch

from .methods import Choice, LayerView
from .selection import average_pool, below, budget, head_mean, margin, window_and_highest


@dataclass(frozen=True)
class GemFilter:
    """Runs the first layers on all new tokens, then all layers on the chosen ones."""

    filter_layer: int | None = None
    retention_rate: float | None = 0.1
    kernel_size: int = 5
    retention_tokens: int | None = None
    protect: int = field(default=0, kw_only=True)

    def acting_layer(self, num_layers: int) -> int:
        """Returns the filter layer's index in a model of `num_layers` layers."""
        if self.filter_layer is None:
            return max(num_layers // 2 - 1, 0)
        assert 0 <= self.filter_layer < num_layers, "filter_layer is not a layer of this model"
        return self.filter_layer

    def choose(self, layer: LayerView) -> Choice:
        return Choice([list(range(len(held))) for held in layer.entries])

    def restart_on(self, layer: LayerView) -> tuple[list[int], float]:
        """Chooses, at the filter layer of the first pass, the tokens to restart on.

        The margin is relative to the largest product: products have either sign and may cancel.
        """
        group = len(layer.queries) // len(layer.entries)
        products = []
        for head, queries in enumerate(layer.queries):
            keys = torch.stack([entry.key for entry in layer.entries[head // group]])
            products.append([float(product) for product in keys @ queries[-1]])
        new_len = len(layer.new_positions)
        # Heads may hold different numbers of earlier entries; the last token does not compete.
        pooled = [average_pool(row, self.kernel_size)[len(row) - new_len : -1] for row in products]
        scores = head_mean(pooled)
        exempt = below(layer.new_positions[:-1], self.protect)
        count = budget(
            self.retention_rate,
            self.retention_tokens,
            seen=layer.seen,
            available=new_len,
            protected=len(exempt) + 1,
        )
        chosen = window_and_highest(scores, new_len, count, exempt)
        scale = max(abs(product) for row in products for product in row)
        return chosen, margin(scores, chosen, exempt, scale=scale)
