"""Keeps more tokens in early layers than in late ones."""

import attrs
import torch
from torch import Tensor

from kvpolicy.attention import group_mean
from kvpolicy.checks import check_count
from kvpolicy.context import LayerContext
from kvpolicy.host_counts import held_counts, known_counts, protected_counts
from kvpolicy.policies.documentation import documented
from kvpolicy.policies.selectors.budgeted import BudgetedSelector
from kvpolicy.selection import select_top


@documented
@attrs.frozen
class PyramidSelector(BudgetedSelector):
    """Keeps the most salient tokens of each KV head, more in early layers than in late ones.

    With ``c`` tokens in the mean budget of a row of ``N``, ``p`` of them protected, ``f = c - p``
    and ``m`` layers, layer ``l`` of the first half keeps ``p + min(f + fall(l), N - p)`` tokens,
    ``fall(l) = f * (beta - 1) * (m - 1 - 2 * l) // (beta * (m - 1))``. The mirrored layer
    ``m - 1 - l`` keeps as many fewer than ``c`` as layer ``l`` keeps more. All layers together keep
    exactly ``m * c`` tokens if all tokens reach all layers.

    With ``floor_tokens = n`` budgets fall less steeply where the last layer would keep fewer than
    ``n`` tokens beside the protected ones: ``f * (beta - 1)`` is then at most
    ``beta * max(f - n, 0)``. If ``f`` is ``n`` or less, all layers keep equally many.

    Args:
        retention_rate: Fraction of the context that layers keep on average, in (0, 1].
        retention_tokens: Number of tokens that layers keep on average, at least 1, in place of the
            rate.
        beta: How steep the pyramid is, at least 1: the last layer keeps about ``f / beta`` tokens
            beside the protected ones; with 1 all layers keep equally many.
        floor_tokens: Tokens that every layer keeps beside the protected ones, at least 0, if the
            mean budget has so many.

    Example:
        >>> rates = PyramidSelector(retention_rate=0.2, beta=4).kept_rates(num_layers=4)
        >>> [round(rate, 2) for rate in rates]
        [0.35, 0.25, 0.15, 0.05]

    Source: PyramidKV (arXiv 2406.02069), section 4. The published code takes equal steps of whole
    tokens from the first layer to the last, so that the total falls a little short.
    """

    paper = "arXiv 2406.02069"

    beta: int = attrs.field(default=20, kw_only=True)
    floor_tokens: int = attrs.field(default=0, kw_only=True)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        check_count("beta", self.beta, minimum=1)
        check_count("floor_tokens", self.floor_tokens)

    def kept_rates(self, num_layers: int, context_len: int | None = None) -> list[float]:
        """Return the fraction of tokens that each layer keeps, which falls with depth.

        See `KVSelector.kept_rates`.
        """
        layers = range(check_count("num_layers", num_layers, minimum=1))
        if context_len is not None:
            check_count("context_len", context_len, minimum=1)
            fixed = min(self.window_size + self.protect, context_len)
            return [
                self.count(context_len, fixed, layer, num_layers) / context_len for layer in layers
            ]
        mean, steps = self.mean_budget.fraction(), max(num_layers - 1, 1)
        falls = [
            mean * (self.beta - 1) / self.beta * (num_layers - 1 - 2 * layer) / steps
            for layer in layers
        ]
        # A layer cannot keep more than the whole context; its mirror layer keeps the rest.
        return [mean + max(min(fall, 1 - mean), mean - 1) for fall in falls]

    def count(self, seen_len: int, protected: int, layer_idx: int, num_layers: int) -> int:
        """Return how many tokens of a row one layer keeps if all of the row's tokens reach it.

        Args:
            seen_len: Tokens of the row's whole context so far.
            protected: Tokens that are kept whatever the budget.
            layer_idx: Index of the layer, from 0.
            num_layers: Layers of the model.
        """
        free = self._free(seen_len, protected)
        first = min(layer_idx, num_layers - 1 - layer_idx)
        steps = num_layers - 1 - 2 * first
        if steps == 0:
            return protected + free
        steepest = min(free * (self.beta - 1), max(free - self.floor_tokens, 0) * self.beta)
        fall = steepest * steps // (self.beta * (num_layers - 1))
        most = min(free + fall, seen_len - protected)
        return protected + (most if layer_idx == first else 2 * free - most)

    def kept_counts(self, context: LayerContext) -> tuple[int, ...] | None:
        """Return how many tokens of each row this layer's budget lets every head keep."""
        fixed = protected_counts(context, tail=self.protected_tail, first=self.protected_first)
        held = held_counts(context)
        if held is None or fixed is None or any(len(set(each)) > 1 for each in fixed):
            return None
        rows = zip(context.seen_len, held, fixed, strict=True)
        return tuple(self._of_layer(context, seen, held, most) for seen, held, (_, most) in rows)

    def _of_layer(self, context: LayerContext, seen: int, held: int, protected: int) -> int:
        """Return how many of a row's ``held`` tokens this layer's budget allows it to keep."""
        return min(held, self.count(seen, protected, context.layer_idx, context.num_layers))

    def select(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        """Return the kept indices ``[batch, kv_heads, kept_len]``; see `KVSelector.select`."""
        assert saliency is not None
        valid, protected = context.valid, self.protected(context)
        budgets = known_counts(self, context) or self._budgets(context, valid, protected)
        scores = group_mean(saliency, context.kv_heads)
        return select_top(scores, budgets, valid=valid, protected=protected)

    def _budgets(self, context: LayerContext, valid: Tensor, protected: Tensor) -> list[list[int]]:
        """Return how many tokens each head keeps, computed from the layer's tensors."""
        available, fixed = torch.stack([valid.sum(dim=-1), protected.sum(dim=-1)]).tolist()
        return [
            [self._of_layer(context, seen, *head) for head in zip(*heads, strict=True)]
            for seen, *heads in zip(context.seen_len, available, fixed, strict=True)
        ]
