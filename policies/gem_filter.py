"""GemFilter: an early layer chooses tokens, and the prefill restarts on them alone."""

from __future__ import annotations

from typing import ClassVar

import attrs
from torch import Tensor
from torch.nn import functional

from kvpolicy.attention import query_key_products
from kvpolicy.budgets import Budget, DefaultRate
from kvpolicy.checks import check_count, check_kernel_size
from kvpolicy.context import LayerContext
from kvpolicy.interfaces import PropagationPolicy, Scorer
from kvpolicy.policies.selectors import KeepAllSelector
from kvpolicy.policy import CachePolicy
from kvpolicy.selection import row_budgets, select_top


@attrs.frozen
class LastQueryProductScorer(Scorer):
    """Raw products of the last token's query with every key, average-pooled.

    ``saliency[h, j] = sum over |j' - j| <= kernel_size // 2 of q_last . k_j' / kernel_size`` per
    query head ``h``, in float32, unscaled and without softmax; keys beyond the edges count as 0.

    Args:
        kernel_size: Width of the pooling, odd, at least 1 (1 does not pool).

    Raises:
        TypeError: ``kernel_size`` is not an int.
        ValueError: ``kernel_size`` is even or below 1.

    Example:
        >>> LastQueryProductScorer(kernel_size=1).num_queries
        1

    Source: GemFilter (arXiv 2409.17422), algorithm 1.
    """

    paper: ClassVar[str] = "arXiv 2409.17422"

    kernel_size: int = 5

    def __attrs_post_init__(self) -> None:
        check_kernel_size(self.kernel_size)

    @property
    def num_queries(self) -> int:
        """The last one."""
        return 1

    def score(self, context: LayerContext) -> Tensor:
        """Return float32 ``[batch, query_heads, key_len]``; see `Scorer.score`."""
        group = context.query_heads // context.kv_heads
        products = query_key_products(context.queries, context.keys)[:, :, -1]
        # Padding stands on the left as 0, like what lies beyond the edge of a row alone.
        products.masked_fill_(~context.valid.repeat_interleave(group, dim=1), 0.0)
        return functional.avg_pool1d(
            products, self.kernel_size, stride=1, padding=self.kernel_size // 2
        )


@attrs.frozen
class RestartPropagation(PropagationPolicy):
    """The most salient tokens at one layer are all that the prefill then runs on, from the start.

    The first pass ends at the filter layer, of which it computes no more than queries, keys and
    values. The second reads the chosen tokens at positions without gaps, and generation continues
    behind them. The saliency is the mean over all query heads. In a later turn the new tokens
    compete for a budget of the whole context so far, so that a short question goes on whole.

    Args:
        filter_layer: Index of the layer that chooses, from 0; None for ``num_layers // 2 - 1``.
        retention_rate: Fraction of the row's context that is chosen, in (0, 1]. 0.1 by default.
        retention_tokens: Number of tokens that are chosen, in place of the rate.
        window_size: Last tokens that are always chosen, at least 1.
        protect: First tokens of the context that are always chosen.

    Raises:
        TypeError: An argument is not of its type.
        ValueError: An argument is out of its range, or both budgets are given.

    Example:
        >>> propagation = RestartPropagation(filter_layer=1, retention_rate=0.25)
        >>> propagation.prefill_passes(num_layers=4)
        ([1.0, 0.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25])

    Source: GemFilter (arXiv 2409.17422). The last token of the prompt is always chosen here; in the
    published code it may be left out, and the next token is then predicted from another.
    """

    paper: ClassVar[str] = "arXiv 2409.17422"

    filter_layer: int | None = None
    retention_rate: float | None = DefaultRate(0.1)
    retention_tokens: int | None = None
    window_size: int = attrs.field(default=1, kw_only=True)
    protect: int = attrs.field(default=0, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if self.filter_layer is not None:
            check_count("filter_layer", self.filter_layer)
        check_count("window_size", self.window_size, minimum=1)
        check_count("protect", self.protect)
        # A default rate that gave way to a number of tokens shall not show in the repr.
        object.__setattr__(self, "retention_rate", self.budget.rate)

    @property
    def restarts(self) -> bool:
        """Yes."""
        return True

    @property
    def protected_tail(self) -> int:
        """The window."""
        return self.window_size

    @property
    def budget(self) -> Budget:
        """How many tokens of each row are chosen."""
        return Budget(self.retention_rate, self.retention_tokens)

    def acting_layers(self, num_layers: int) -> frozenset[int]:
        """The filter layer; raises ValueError if it lies outside the model."""
        if self.filter_layer is None:
            return frozenset({max(num_layers // 2 - 1, 0)})
        if self.filter_layer >= num_layers:
            raise ValueError(
                f"filter_layer must be in [0, {num_layers - 1}] for a model of {num_layers} "
                f"layers, got {self.filter_layer}"
            )
        return frozenset({self.filter_layer})

    @property
    def protected_first(self) -> int:
        """``protect``."""
        return self.protect

    def layer_rates(self, num_layers: int, context_len: int | None = None) -> list[float]:
        """The rate, everywhere; see `PropagationPolicy.layer_rates`."""
        fixed = self.window_size + self.protect
        return [self.budget.fraction(context_len, protected=fixed)] * num_layers

    def prefill_passes(
        self, num_layers: int, context_len: int | None = None
    ) -> tuple[list[float], ...]:
        """1 below the filter layer, then the rate everywhere.

        See `PropagationPolicy.prefill_passes`. The first pass leaves the filter layer after its
        projections, which are not counted.
        """
        (layer,) = self.acting_layers(num_layers)
        first = [1.0 if index < layer else 0.0 for index in range(num_layers)]
        return first, self.layer_rates(num_layers, context_len)

    def propagate(self, saliency: Tensor | None, context: LayerContext) -> Tensor | None:
        """Return int64 ``[batch, passed_len]`` or None; see `PropagationPolicy.propagate`."""
        assert saliency is not None
        valid = context.new_valid[:, None]  # [batch, 1, new_len]
        protected = self.protected(context)[:, None]
        budgets = row_budgets(self.budget, context.seen_len, valid=valid, protected=protected)
        if budgets == valid.sum(dim=-1).flatten().tolist():
            return None
        new = context.heads.mean(saliency[..., context.key_len - context.new_len :])
        return select_top(new[:, None], budgets, valid=valid, protected=protected)[:, 0]


class GemFilter(CachePolicy):
    """Chooses tokens at one layer by the last query, and starts again on those alone.

    Every layer keeps all tokens of the second pass. What the chosen tokens would have learnt from
    the others is lost to them, the price of a prefill that is as short as the cache.

    Args:
        filter_layer: Index of the layer that chooses, from 0; None for ``num_layers // 2 - 1``
            (the paper: 13 of 32).
        retention_rate: Fraction of the context that is chosen, in (0, 1].
        kernel_size: Width of the average-pooling, odd.
        retention_tokens: Number of tokens that are chosen, in place of the rate.
        protect: First tokens of the context that are always chosen.

    Raises:
        TypeError: An argument is not of its type.
        ValueError: An argument is out of its range, or both budgets are given.

    Example:
        >>> gem_filter = GemFilter(filter_layer=13, retention_rate=0.1)
        >>> round(gem_filter.prefill_compute_rate(num_layers=32), 2)
        0.51

    Source: Discovering the Gems in Early Layers: Accelerating Long-Context LLMs with 1000x Input
    Token Reduction (arXiv 2409.17422). Here the last prompt token is always among the chosen.
    """

    paper: ClassVar[str] = "arXiv 2409.17422"

    def __init__(
        self,
        filter_layer: int | None = None,
        retention_rate: float | None = DefaultRate(0.1),
        kernel_size: int = 5,
        *,
        retention_tokens: int | None = None,
        protect: int = 0,
    ) -> None:
        super().__init__(
            LastQueryProductScorer(kernel_size),
            KeepAllSelector(),
            RestartPropagation(filter_layer, retention_rate, retention_tokens, protect=protect),
        )
