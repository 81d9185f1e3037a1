"""Wraps selectors: changes what another selector keeps."""

from __future__ import annotations

import attrs
from torch import Tensor

from kvpolicy.budgets import Budget
from kvpolicy.checks import check_kind
from kvpolicy.context import LayerContext
from kvpolicy.interfaces import KVSelector


@attrs.frozen
class WrappingSelector(KVSelector):
    """Changes another selector's choice; needs and protects what that one does."""

    selector: KVSelector

    def __attrs_post_init__(self) -> None:
        check_kind("selector", self.selector, KVSelector)

    @property
    def history_layers(self) -> int:
        """The wrapped selector looks at so many layers before."""
        return self.selector.history_layers

    @property
    def needs_rotary(self) -> bool:
        """True if the wrapped selector needs the rotary embedding."""
        return self.selector.needs_rotary

    @property
    def needs_output_weight(self) -> bool:
        """True if the wrapped selector reads the output weights."""
        return self.selector.needs_output_weight

    @property
    def needs_saliency(self) -> bool:
        """True if the wrapped selector reads the saliency."""
        return self.selector.needs_saliency

    @property
    def protected_tail(self) -> int:
        """The wrapped selector protects so many trailing tokens."""
        return self.selector.protected_tail

    @property
    def protected_first(self) -> int:
        """The wrapped selector protects so many first tokens."""
        return self.selector.protected_first

    @property
    def budget(self) -> Budget | None:
        """The wrapped selector's budget holds."""
        return self.selector.budget

    @property
    def is_bounded(self) -> bool:
        """True if the wrapped selector is bounded."""
        return self.selector.is_bounded

    def protected(self, context: LayerContext) -> Tensor:
        """Return what the wrapped selector protects; see `KVSelector.protected`."""
        return self.selector.protected(context)

    def kept_rates(self, num_layers: int, context_len: int | None = None) -> list[float]:
        """Return the wrapped selector's rates; see `KVSelector.kept_rates`."""
        return self.selector.kept_rates(num_layers, context_len)

    def around(self, selector: KVSelector) -> KVSelector:
        """Wrap another selector, one under a bound, for every layer of an answer."""
        return attrs.evolve(self, selector=selector)
