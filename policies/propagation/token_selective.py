"""Drops tokens after one layer."""

import functools
from collections.abc import Sequence

import attrs

from kvpolicy.budgets import Budget, DefaultRate
from kvpolicy.checks import check_count, check_rate
from kvpolicy.interfaces import PropagationPolicy, nearest_layer
from kvpolicy.policies.propagation.shared import RankingPropagation, within


@attrs.frozen
class TokenSelectivePropagation(RankingPropagation):
    """Drops tokens after one layer, except the most salient and the last ones.

    The saliency is the mean over all query heads of the layer; tokens keep their original rotary
    positions. In a later turn the new tokens compete for a budget of the whole context so far,
    so that a short question goes on whole.

    Args:
        tsp_rate: Fraction of the row's context that goes on, in (0, 1]. 0.2 by default.
        tsp_layer: Index of the layer after which tokens are dropped, from 0; None for
            ``num_layers // 2 - 1``, or the layer nearest to it that sees the whole context.
        window_size: Trailing tokens that always go on, at least 1.
        tsp_tokens: Number of tokens that go on, in place of the rate.
        protect: First tokens of the row's context that always go on, at least 0.
        tsp_depth: The layer as a fraction of the model in (0, 1], in place of ``tsp_layer``:
            ``int(num_layers * tsp_depth) - 1``, at least 0.

    Raises:
        TypeError: An argument is not of its type.
        ValueError: An argument is out of its range, both budgets are given, or both ``tsp_layer``
            and ``tsp_depth``.

    Example:
        >>> rates = TokenSelectivePropagation(tsp_layer=1, tsp_rate=0.25).layer_rates(num_layers=4)
        >>> rates
        [1.0, 1.0, 0.25, 0.25]

    Source: FastKV (arXiv 2502.01068), section 3, token-selective propagation.
    """

    paper = "arXiv 2502.01068"

    tsp_rate: float | None = DefaultRate(0.2)
    tsp_layer: int | None = attrs.field(default=None, kw_only=True)
    window_size: int = attrs.field(default=8, kw_only=True)
    tsp_tokens: int | None = attrs.field(default=None, kw_only=True)
    protect: int = attrs.field(default=0, kw_only=True)
    tsp_depth: float | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if self.tsp_layer is not None and self.tsp_depth is not None:
            raise ValueError(
                "at most one of tsp_layer and tsp_depth must be given, got "
                f"tsp_layer={self.tsp_layer} and tsp_depth={self.tsp_depth}"
            )
        if self.tsp_layer is not None:
            check_count("tsp_layer", self.tsp_layer)
        if self.tsp_depth is not None:
            check_rate("tsp_depth", self.tsp_depth)
        check_count("protect", self.protect)
        # At least the last token: the next one is predicted from it.
        check_count("window_size", self.window_size, minimum=1)
        # A default rate that gave way to a number of tokens shall not show in the repr.
        object.__setattr__(self, "tsp_rate", self.budget.rate)

    @property
    def protected_tail(self) -> int:
        """The number of last tokens that score the others and always go on to later layers."""
        return self.window_size

    @property
    def protected_first(self) -> int:
        """The number of the context's first tokens that always go on to later layers."""
        return self.protect

    @functools.cached_property
    def budget(self) -> Budget:
        """The number or fraction of each row's tokens that go on to later layers."""
        return Budget(self.tsp_rate, self.tsp_tokens, name="tsp")

    def acting_layers(self, num_layers: int) -> frozenset[int]:
        """Return the layer after which tokens are dropped; ValueError if outside the model."""
        if self.tsp_layer is None:
            depth = 0.5 if self.tsp_depth is None else self.tsp_depth
            return frozenset({max(int(num_layers * depth) - 1, 0)})
        return within("tsp_layer", self.tsp_layer, num_layers)

    def placed(self, num_layers: int, eligible: Sequence[int]) -> PropagationPolicy:
        """Return a copy whose drop layer, if unset, is the allowed layer nearest to the default."""
        (wanted,) = self.acting_layers(num_layers)
        if self.tsp_layer is not None or wanted in eligible:
            return self
        return attrs.evolve(self, tsp_layer=nearest_layer(wanted, eligible), tsp_depth=None)

    def layer_rates(self, num_layers: int, context_len: int | None = None) -> list[float]:
        """Return the fraction of tokens that reach each layer: 1 up to where tokens are dropped."""
        (layer,) = self.acting_layers(num_layers)
        rate = self.budget.fraction(context_len, protected=self.window_size + self.protect)
        return [1.0 if index <= layer else rate for index in range(num_layers)]
