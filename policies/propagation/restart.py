"""Runs the prefill again on the tokens that one layer chooses."""

import functools
from collections.abc import Sequence

import attrs

from kvpolicy.budgets import Budget, DefaultRate
from kvpolicy.checks import check_count
from kvpolicy.interfaces import PropagationPolicy, nearest_layer
from kvpolicy.policies.propagation.shared import RankingPropagation, within


@attrs.frozen
class RestartPropagation(RankingPropagation):
    """Chooses the most salient tokens at one layer and runs the prefill again on only these.

    The first pass ends at the filter layer, of which it computes only queries, keys and values.
    The second pass reads the chosen tokens at positions without gaps, and generation continues
    after them. The saliency is averaged over all query heads. In a later turn the budget refers to
    the whole context so far but only new tokens are chosen, so that a short question is kept whole.

    Args:
        retention_rate: Fraction of the row's context that is chosen, in (0, 1]. 0.1 by default.
        filter_layer: Index of the layer that chooses, from 0; None for ``num_layers // 2 - 1``.
            Not a ``tsp_layer``: the prefill restarts at the first layer.
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

    paper = "arXiv 2409.17422"
    restarts = True  # the prefill runs again on the chosen tokens

    retention_rate: float | None = DefaultRate(0.1)
    filter_layer: int | None = attrs.field(default=None, kw_only=True)
    retention_tokens: int | None = attrs.field(default=None, kw_only=True)
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
    def protected_tail(self) -> int:
        """The number of last tokens that score the others and are always chosen for the restart."""
        return self.window_size

    @functools.cached_property
    def budget(self) -> Budget:
        """The number or fraction of a row's tokens that are chosen for the second prefill."""
        return Budget(self.retention_rate, self.retention_tokens)

    def acting_layers(self, num_layers: int) -> frozenset[int]:
        """Return the layer that chooses the tokens; ValueError if outside the model."""
        if self.filter_layer is None:
            return frozenset({max(num_layers // 2 - 1, 0)})
        return within("filter_layer", self.filter_layer, num_layers)

    def placed(self, num_layers: int, eligible: Sequence[int]) -> PropagationPolicy:
        """Return a copy with an unset ``filter_layer`` set to an allowed layer near the default."""
        (wanted,) = self.acting_layers(num_layers)
        if self.filter_layer is not None or wanted in eligible:
            return self
        return attrs.evolve(self, filter_layer=nearest_layer(wanted, eligible))

    @property
    def protected_first(self) -> int:
        """The number of the context's first tokens that are always chosen for the restart."""
        return self.protect

    def layer_rates(self, num_layers: int, context_len: int | None = None) -> list[float]:
        """Return the fraction of tokens that the second prefill runs on, for every layer."""
        fixed = self.window_size + self.protect
        return [self.budget.fraction(context_len, protected=fixed)] * num_layers

    def prefill_passes(
        self, num_layers: int, context_len: int | None = None
    ) -> tuple[list[float], ...]:
        """Return the fraction of tokens that each layer computes, in the first and second prefill.

        See `PropagationPolicy.prefill_passes`. The first pass leaves the filter layer after its
        projections, which are not counted.
        """
        (layer,) = self.acting_layers(num_layers)
        first = [1.0 if index < layer else 0.0 for index in range(num_layers)]
        return first, self.layer_rates(num_layers, context_len)
