"""Selectors whose layers, or whose heads, share a budget: not every one keeps as many tokens."""

from __future__ import annotations

from typing import ClassVar

import attrs
import torch
from torch import Tensor

from kvpolicy.attention import group_mean
from kvpolicy.budgets import Budget, DefaultRate
from kvpolicy.checks import check_count, check_rate
from kvpolicy.context import LayerContext
from kvpolicy.interfaces import KVSelector
from kvpolicy.selection import compress, ranks, select_top


@attrs.frozen
class _SharedBudgetSelector(KVSelector):
    """What both selectors have: a budget that holds on average, a window and first tokens."""

    retention_rate: float | None = DefaultRate(0.1)
    window_size: int = 8
    retention_tokens: int | None = None
    protect: int = attrs.field(default=0, kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_count("window_size", self.window_size)
        check_count("protect", self.protect)
        # A default rate that gave way to a number of tokens shall not show in the repr.
        object.__setattr__(self, "retention_rate", self.mean_budget.rate)

    @property
    def protected_tail(self) -> int:
        """The window."""
        return self.window_size

    @property
    def protected_first(self) -> int:
        """Those of ``protect``."""
        return self.protect

    @property
    def mean_budget(self) -> Budget:
        """How many tokens each row keeps on average over layers and heads."""
        return Budget(self.retention_rate, self.retention_tokens)

    def _free(self, seen_len: int, protected: int) -> int:
        """Tokens of the mean budget beside the protected ones, if all tokens are there."""
        count = self.mean_budget.count(seen_len=seen_len, available=seen_len, protected=protected)
        return count - protected


@attrs.frozen
class PyramidSelector(_SharedBudgetSelector):
    """Keeps more in early layers and less in late ones; within a layer as `GQAGroupSelector`.

    With ``c`` tokens in the mean budget of a row of ``N``, ``p`` of them protected, ``f = c - p``
    and ``m`` layers, layer ``l`` of the first half keeps ``p + min(f + fall(l), N - p)`` tokens,
    ``fall(l) = f * (beta - 1) * (m - 1 - 2 * l) // (beta * (m - 1))``, and its mirror
    ``m - 1 - l`` as many fewer than ``c`` as that is more. All layers together keep ``m * c``
    exactly where all tokens reach all layers.

    Args:
        retention_rate: Fraction of the row's context that layers keep on average, in (0, 1]. 0.1
            by default.
        window_size: Trailing tokens that are always kept, at least 0.
        retention_tokens: Number of tokens that layers keep on average, in place of the rate.
        beta: How steep the pyramid is, at least 1: the last layer keeps about ``f / beta`` tokens
            beside the protected ones; 1 is no fall.
        protect: First tokens of the row's context that are always kept, at least 0.

    Raises:
        TypeError: An argument is not of its type.
        ValueError: An argument is out of its range, or both budgets are given.

    Example:
        >>> rates = PyramidSelector(retention_rate=0.2, beta=4).kept_rates(num_layers=4)
        >>> [round(rate, 2) for rate in rates]
        [0.35, 0.25, 0.15, 0.05]

    Source: PyramidKV (arXiv 2406.02069), section 4. The published code takes equal steps of whole
    tokens from the first layer to the last, so that the total falls a little short.
    """

    paper: ClassVar[str] = "arXiv 2406.02069"

    beta: int = 20

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        check_count("beta", self.beta, minimum=1)

    def kept_rates(self, num_layers: int, context_len: int | None = None) -> list[float]:
        """Falling with depth; without ``context_len`` those of a long prompt.

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
        # The whole context is as much as a layer can keep: its mirror keeps what that leaves.
        return [mean + max(min(fall, 1 - mean), mean - 1) for fall in falls]

    def count(self, seen_len: int, protected: int, layer_idx: int, num_layers: int) -> int:
        """Number of tokens that a layer keeps of a row, if all of them reach it.

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
        fall = free * (self.beta - 1) * steps // (self.beta * (num_layers - 1))
        most = min(free + fall, seen_len - protected)
        return protected + (most if layer_idx == first else 2 * free - most)

    def select(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        """Return int64 ``[batch, kv_heads, kept_len]``; see `KVSelector.select`."""
        assert saliency is not None
        valid, protected = context.valid, self.protected(context)
        available, fixed = torch.stack([valid.sum(dim=-1), protected.sum(dim=-1)]).tolist()
        budgets = [
            [
                min(tokens, self.count(seen, always, context.layer_idx, context.num_layers))
                for tokens, always in zip(*heads, strict=True)
            ]
            for seen, *heads in zip(context.seen_len, available, fixed, strict=True)
        ]
        scores = group_mean(saliency, context.kv_heads)
        return select_top(scores, budgets, valid=valid, protected=protected)


@attrs.frozen
class AdaptiveHeadSelector(_SharedBudgetSelector):
    """The KV heads of a layer share its budget: heads that spread their attention keep more.

    With ``c`` tokens in the mean budget of a row, ``p`` of them protected and ``f = c - p``, each
    KV head first takes its own ``g = int(f * floor)`` most salient tokens beside the protected
    ones. The other ``kv_heads * (f - g)`` places of the layer go to the most salient of what is
    left, all heads together; of equals, to the lower head and then to the earlier token. The
    saliency of a KV head is the mean over the query heads of its group. All heads together keep
    ``kv_heads * c`` exactly where all tokens reach the layer. A head that has fewer than ``g`` to
    take from leaves the rest of its ``g`` unused.

    Args:
        retention_rate: Fraction of the row's context that heads keep on average, in (0, 1]. 0.1
            by default.
        window_size: Trailing tokens that are always kept, at least 0.
        retention_tokens: Number of tokens that heads keep on average, in place of the rate.
        floor: Share of the free places that every head fills by itself, in [0, 1]; 1 is the same
            for every head.
        protect: First tokens of the row's context that are always kept, at least 0.

    Raises:
        TypeError: An argument is not of its type.
        ValueError: An argument is out of its range, or both budgets are given.

    Example:
        >>> AdaptiveHeadSelector(retention_tokens=512).mean_budget
        Budget(rate=None, tokens=512)

    Source: Ada-KV (arXiv 2407.11550), section 4. The published code ranks all tokens of all heads
    together and then moves every head's number towards the mean, so that rounding leaves the total
    near the budget; here a head's floor is set aside first and the total is exact.
    """

    paper: ClassVar[str] = "arXiv 2407.11550"

    floor: float = 0.2

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        check_rate("floor", self.floor, zero=True)

    def kept_rates(self, num_layers: int, context_len: int | None = None) -> list[float]:
        """The mean budget's; see `KVSelector.kept_rates`."""
        check_count("num_layers", num_layers, minimum=1)
        fixed = self.window_size + self.protect
        return [self.mean_budget.fraction(context_len, protected=fixed)] * num_layers

    def select(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        """Return int64 ``[batch, kv_heads, kept_len]``; see `KVSelector.select`.

        Heads that keep fewer than others are filled with -1 on the left.
        """
        assert saliency is not None
        scores = context.heads.gather(group_mean(saliency, context.kv_heads))
        valid = context.heads.gather(context.valid)
        protected = context.heads.gather(self.protected(context))
        own, shared = self._places(context.seen_len, protected)
        candidates = valid & ~protected
        taken = candidates & (ranks(scores, candidates) < own[:, None, None])
        rest = candidates & ~taken
        places = ranks(scores.flatten(1), rest.flatten(1)).view_as(rest)  # over all heads
        chosen = protected | taken | (rest & (places < shared[:, None, None]))
        first = context.heads.share * context.kv_heads
        here = chosen[:, first : first + context.kv_heads, chosen.shape[2] - context.key_len :]
        return compress(here, int(here.sum(dim=-1).max()))

    def _places(self, seen_len: tuple[int, ...], protected: Tensor) -> tuple[Tensor, Tensor]:
        """Of each row ``[batch]``, the places every head has of its own, and those all share."""
        fixed = protected.sum(dim=-1).amax(dim=-1).tolist()
        free = [self._free(seen, always) for seen, always in zip(seen_len, fixed, strict=True)]
        own = [int(count * self.floor) for count in free]
        shared = [
            protected.shape[1] * (count - of_head) for count, of_head in zip(free, own, strict=True)
        ]
        device = protected.device
        return torch.tensor(own, device=device), torch.tensor(shared, device=device)
