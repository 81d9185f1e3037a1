"""Selectors that change what another selector keeps."""

from __future__ import annotations

import attrs
from torch import Tensor

from kvpolicy.budgets import Budget
from kvpolicy.checks import check_kind
from kvpolicy.context import LayerContext
from kvpolicy.interfaces import KVSelector


@attrs.frozen
class WrappingSelector(KVSelector):
    """Another selector's choice, changed; needs and protects what that one does."""

    selector: KVSelector

    def __attrs_post_init__(self) -> None:
        check_kind("selector", self.selector, KVSelector)

    @property
    def history_layers(self) -> int:
        """What the selector asks for."""
        return self.selector.history_layers

    @property
    def needs_rotary(self) -> bool:
        """What the selector asks for."""
        return self.selector.needs_rotary

    @property
    def needs_output_weight(self) -> bool:
        """What the selector asks for."""
        return self.selector.needs_output_weight

    @property
    def needs_saliency(self) -> bool:
        """What the selector asks for."""
        return self.selector.needs_saliency

    @property
    def protected_tail(self) -> int:
        """That of the selector."""
        return self.selector.protected_tail

    @property
    def protected_first(self) -> int:
        """Those of the selector."""
        return self.selector.protected_first

    @property
    def budget(self) -> Budget | None:
        """That of the selector."""
        return self.selector.budget

    @property
    def is_bounded(self) -> bool:
        """As the selector."""
        return self.selector.is_bounded

    def protected(self, context: LayerContext) -> Tensor:
        """Those of the selector; see `KVSelector.protected`."""
        return self.selector.protected(context)

    def kept_rates(self, num_layers: int, context_len: int | None = None) -> list[float]:
        """Those of the selector; see `KVSelector.kept_rates`."""
        return self.selector.kept_rates(num_layers, context_len)

    def around(self, selector: KVSelector) -> KVSelector:
        """The same around another selector, one under a bound, for every layer of an answer."""
        return attrs.evolve(self, selector=selector)
