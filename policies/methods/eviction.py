"""Bases of methods that read the whole prompt and keep the tokens that one scorer ranks highest."""

from abc import abstractmethod
from typing import Any

import attrs

from kvpolicy.budgets import DefaultRate
from kvpolicy.interfaces import KVSelector, Scorer
from kvpolicy.policies.documentation import documented
from kvpolicy.policies.methods.method import Method, Parts
from kvpolicy.policies.propagation.pass_all import PassAllPropagation
from kvpolicy.policies.scorers.window import WindowMaxPoolScorer
from kvpolicy.policies.selectors.budgeted import BudgetedSelector
from kvpolicy.policies.selectors.gqa_group import GQAGroupSelector


@documented
@attrs.frozen
class EvictionMethod(Method):
    """Base of methods where one scorer ranks the tokens of every layer; prefill is complete.

    A subclass returns its scorer, and adds arguments as fields. They come after ``window_size`` in
    its signature; ``retention_tokens`` and ``protect`` are keyword-only.

    Example:
        >>> from kvpolicy.policies import LastQueryScorer
        >>> @documented
        ... @attrs.frozen
        ... class LastToken(EvictionMethod):
        ...     '''Keeps what the last token attends to.'''
        ...
        ...     def _scorer(self) -> Scorer:
        ...         return LastQueryScorer()
        >>> LastToken(retention_tokens=512).selector.budget
        Budget(rate=None, tokens=512)
    """

    retention_rate: float | None = DefaultRate(0.1)
    window_size: int = attrs.field(default=8, kw_only=True)
    retention_tokens: int | None = attrs.field(default=None, kw_only=True)
    protect: int = attrs.field(default=0, kw_only=True)

    @abstractmethod
    def _scorer(self) -> Scorer:
        """Make the scorer that ranks the tokens."""

    def _selector(self) -> KVSelector:
        """Make the selector, which keeps equally many tokens in every layer and KV head."""
        return self._budgeted(GQAGroupSelector)

    def _budgeted(self, kind: type[BudgetedSelector], **more: Any) -> KVSelector:
        """Make a selector of the method's budget, of the given class."""
        return kind(
            self.retention_rate,
            window_size=self.window_size,
            retention_tokens=self.retention_tokens,
            protect=self._first,
            **more,
        )

    @property
    def _first(self) -> int:
        """The number of first tokens that are always kept."""
        return self.protect

    def _parts(self) -> Parts:
        """Make the scorer, the selector and a propagation policy that drops nothing."""
        return self._scorer(), self._selector(), PassAllPropagation()


@attrs.frozen
class WindowEvictionMethod(EvictionMethod):
    """Base of methods that rank tokens as SnapKV does: by the last tokens' max-pooled attention."""

    kernel_size: int = attrs.field(default=7, kw_only=True)
    group_first: bool = attrs.field(default=False, kw_only=True)

    def _scorer(self) -> Scorer:
        return WindowMaxPoolScorer(
            self.window_size, kernel_size=self.kernel_size, group_first=self.group_first
        )
