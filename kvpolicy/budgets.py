"""Budgets: a rate or a number of tokens, and how it becomes the number of tokens to keep."""

from __future__ import annotations

import attrs

from kvpolicy.checks import check_count, check_kind, check_rate


class DefaultRate(float):
    """A retention rate that is only a default: a number of tokens given by the caller replaces it.

    ``SnapKV(retention_tokens=512)`` leaves ``retention_rate`` at its default. This class tells the
    default from a rate that the caller wrote: giving both a rate and a number is an error.
    """


@attrs.frozen
class Budget:
    """How many tokens to keep: either a fraction of the context or a number of tokens.

    Args:
        rate: Fraction in (0, 1] of all tokens of the row's context so far. A `DefaultRate` yields
            to ``tokens``.
        tokens: Number of tokens, at least 1.
        name: What the budget is for, the prefix of the argument names in messages.

    Raises:
        TypeError: ``rate`` is not a number or ``tokens`` not an int.
        ValueError: either is out of its range, or not exactly one of the two is given.

    Example:
        >>> Budget(rate=0.1).count(seen_len=1000, available=1000, protected=8)
        100
        >>> Budget(rate=0.1).count(seen_len=40, available=40, protected=8)
        8
        >>> Budget(tokens=64).count(seen_len=40, available=40, protected=8)
        40
    """

    rate: float | None = None
    tokens: int | None = None
    name: str = attrs.field(default="retention", eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        if isinstance(self.rate, DefaultRate) and self.tokens is not None:
            object.__setattr__(self, "rate", None)  # the class is frozen to everyone else
        if (self.rate is None) == (self.tokens is None):
            raise ValueError(
                f"exactly one of {self.name}_rate and {self.name}_tokens must be given, got "
                f"{self.name}_rate={self.rate} and {self.name}_tokens={self.tokens}"
            )
        if self.tokens is not None:
            check_count(f"{self.name}_tokens", self.tokens, minimum=1)
        else:
            object.__setattr__(self, "rate", check_rate(f"{self.name}_rate", self.rate))

    def count(self, *, seen_len: int, available: int, protected: int) -> int:
        """Count the tokens to keep: ``min(available, max(int(seen_len * rate), protected, 1))``.

        Args:
            seen_len: Tokens of the row's whole context so far. A rate refers to these, also in
                layers that fewer tokens reach, and in later conversation turns.
            available: Tokens there are to choose from.
            protected: Tokens that are kept whatever the budget.

        Returns:
            The number of tokens, with ``tokens`` in the place of ``int(seen_len * rate)`` where
            the budget is a count. At least 1, so that a short prompt is never emptied.
        """
        wanted = self.tokens if self.rate is None else int(seen_len * self.rate)
        assert wanted is not None
        return min(available, max(wanted, protected, 1))

    def fraction(self, context_len: int | None = None, *, protected: int = 0) -> float:
        """Return the budget as a fraction of a prompt's tokens.

        Args:
            context_len: Tokens of the prompt, needed where the budget is a number of tokens; None
                for a prompt so long that the protected tokens do not matter.
            protected: Tokens that are kept whatever the budget.

        Raises:
            TypeError: ``context_len`` or ``protected`` is not an int.
            ValueError: ``context_len`` is below 1, or needed and not given; ``protected`` is
                negative.
        """
        check_count("protected", protected)
        if context_len is not None:
            check_count("context_len", context_len, minimum=1)
        if self.rate is not None:
            if context_len is None:
                return self.rate
            return max(self.rate, min(max(protected, 1), context_len) / context_len)
        if context_len is None:
            raise ValueError(f"context_len must be given if {self.name}_tokens is, got None")
        kept = self.count(seen_len=context_len, available=context_len, protected=protected)
        return kept / context_len

    @property
    def amount(self) -> float:
        """The budget's rate, or its number of tokens if it has no rate."""
        amount = self.tokens if self.rate is None else self.rate
        assert amount is not None
        return amount

    def exceeds(self, other: Budget) -> bool:
        """True if this budget keeps more tokens than the ``other`` budget for every context length.

        A rate and a number of tokens cannot be compared before the context is known: False.

        Raises:
            TypeError: ``other`` is not a `Budget`.
        """
        check_kind("other", other, Budget)
        if self.rate is not None and other.rate is not None:
            return self.rate > other.rate
        if self.tokens is not None and other.tokens is not None:
            return self.tokens > other.tokens
        return False
