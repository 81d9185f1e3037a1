"""Base of selectors that change another selector's choice."""

import attrs
from torch import Tensor

from kvpolicy.budgets import Budget
from kvpolicy.checks import check_kind
from kvpolicy.context import LayerContext
from kvpolicy.interfaces import KVSelector


@attrs.frozen
class WrappingSelector(KVSelector):
    """Base of selectors that change which tokens another selector keeps."""

    selector: KVSelector

    def __attrs_post_init__(self) -> None:
        check_kind("selector", self.selector, KVSelector)

    @property
    def inner_parts(self) -> tuple[KVSelector, ...]:
        """The wrapped selector."""
        return (self.selector,)

    @property
    def needs_saliency(self) -> bool:
        """True if the wrapped selector reads the saliency."""
        return self.selector.needs_saliency

    @property
    def protected_tail(self) -> int:
        """The number of last tokens that the wrapped selector always keeps."""
        return self.selector.protected_tail

    @property
    def protected_first(self) -> int:
        """The number of the context's first tokens that the wrapped selector always keeps."""
        return self.selector.protected_first

    @property
    def budget(self) -> Budget | None:
        """The wrapped selector's budget of tokens."""
        return self.selector.budget

    @property
    def unequal_heads(self) -> bool:
        """True if heads may keep different numbers of tokens under the wrapped selector."""
        return self.selector.unequal_heads

    @property
    def is_bounded(self) -> bool:
        """True if the wrapped selector's number of kept tokens does not grow with the context."""
        return self.selector.is_bounded

    def protected(self, context: LayerContext) -> Tensor:
        """Mark the tokens that the wrapped selector always keeps."""
        return self.selector.protected(context)

    def kept_rates(self, num_layers: int, context_len: int | None = None) -> list[float]:
        """Return the fraction of tokens that the wrapped selector keeps, for each layer."""
        return self.selector.kept_rates(num_layers, context_len)

    def around(self, selector: KVSelector) -> KVSelector:
        """Return a copy that wraps the given selector instead, for eviction while decoding."""
        return attrs.evolve(self, selector=selector)
