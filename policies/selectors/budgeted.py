"""The base of selectors with a budget, of which some tokens are always kept."""

import functools

import attrs

from kvpolicy.budgets import Budget, DefaultRate
from kvpolicy.checks import check_count
from kvpolicy.interfaces import KVSelector


@attrs.frozen
class BudgetedSelector(KVSelector):
    """Base of selectors that meet a budget in every layer and head, or on average over them."""

    retention_rate: float | None = DefaultRate(0.1)
    window_size: int = attrs.field(default=8, kw_only=True)
    retention_tokens: int | None = attrs.field(default=None, kw_only=True)
    protect: int = attrs.field(default=0, kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_count("window_size", self.window_size)
        check_count("protect", self.protect)
        # A default rate that gave way to a number of tokens shall not show in the repr.
        object.__setattr__(self, "retention_rate", self.mean_budget.rate)

    @property
    def protected_tail(self) -> int:
        """The number of last tokens that are always kept."""
        return self.window_size

    @property
    def protected_first(self) -> int:
        """The number of the context's first tokens that are always kept."""
        return self.protect

    @functools.cached_property
    def mean_budget(self) -> Budget:
        """The number or fraction of a row's tokens kept, averaged over layers and heads."""
        return Budget(self.retention_rate, self.retention_tokens)

    @property
    def is_bounded(self) -> bool:
        """True if the budget is a number of tokens, not a fraction of the context."""
        return self.mean_budget.tokens is not None

    def kept_rates(self, num_layers: int, context_len: int | None = None) -> list[float]:
        """Return the fraction of tokens that each layer keeps, averaged over layers and heads."""
        check_count("num_layers", num_layers, minimum=1)
        fixed = self.window_size + self.protect
        return [self.mean_budget.fraction(context_len, protected=fixed)] * num_layers

    def _free(self, seen_len: int, protected: int) -> int:
        """Return the mean number of tokens that a head keeps besides the protected ones."""
        count = self.mean_budget.count(seen_len=seen_len, available=seen_len, protected=protected)
        return count - protected
