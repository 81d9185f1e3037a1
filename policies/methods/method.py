"""What all named methods are: arguments, and the parts made of them."""

from __future__ import annotations

from abc import abstractmethod

import attrs

from kvpolicy.budgets import DefaultRate
from kvpolicy.interfaces import KVSelector, PropagationPolicy, Scorer
from kvpolicy.policy import CachePolicy

Parts = tuple[Scorer | None, KVSelector, PropagationPolicy]


@attrs.frozen
class Method(CachePolicy):
    """A policy that makes its parts of arguments of its own, which are its fields.

    Two are equal where their arguments are. A method that only ranks tokens for eviction is shorter
    as an `EvictionMethod`.

    Example:
        >>> from kvpolicy.policies import SnapKV
        >>> SnapKV(window_size=4)
        SnapKV(retention_rate=0.1, window_size=4, retention_tokens=None, protect=0, kernel_size=7)
        >>> SnapKV(window_size=4).scorer
        WindowMaxPoolScorer(window_size=4, kernel_size=7)
    """

    scorer: Scorer | None = attrs.field(init=False, eq=False, repr=False)
    selector: KVSelector = attrs.field(init=False, eq=False, repr=False)
    propagation: PropagationPolicy = attrs.field(init=False, eq=False, repr=False)

    @abstractmethod
    def _parts(self) -> Parts:
        """The scorer, the selector and the propagation policy for these arguments."""

    def __attrs_post_init__(self) -> None:
        names = ("scorer", "selector", "propagation")
        for name, part in zip(names, self._parts(), strict=True):
            object.__setattr__(self, name, part)  # the class is frozen to everyone else
        super().__attrs_post_init__()
        self._drop_rates_that_gave_way()

    def _drop_rates_that_gave_way(self) -> None:
        """A default rate that gave way to a number of tokens shall not show in the repr."""
        for field in attrs.fields(type(self)):
            tokens = field.name.removesuffix("_rate") + "_tokens"
            yields = isinstance(getattr(self, field.name), DefaultRate)
            if yields and getattr(self, tokens, None) is not None:
                object.__setattr__(self, field.name, None)
