from typing import Any

import pytest

from kvpolicy import Budget
from kvpolicy.budgets import DefaultRate


@pytest.mark.parametrize(
    ("budget", "seen_len", "available", "protected", "expected"),
    [
        (Budget(rate=0.1), 1000, 1000, 8, 100),
        (Budget(rate=0.1), 109, 109, 8, 10),  # int() rounds down
        (Budget(rate=0.1), 1000, 60, 8, 60),  # fewer tokens reached the layer
        (Budget(rate=0.1), 50, 50, 8, 8),  # the window is kept in any case
        (Budget(rate=0.1), 5, 5, 8, 5),  # shorter than the window
        (Budget(rate=0.1), 5, 5, 0, 1),  # never nothing
        (Budget(rate=1.0), 37, 37, 8, 37),
        (Budget(tokens=64), 1000, 1000, 8, 64),
        (Budget(tokens=64), 1000, 40, 8, 40),
        (Budget(tokens=3), 1000, 1000, 8, 8),
    ],
)
def test_counts(
    budget: Budget, seen_len: int, available: int, protected: int, expected: int
) -> None:
    assert budget.count(seen_len=seen_len, available=available, protected=protected) == expected


def test_a_default_rate_yields_to_tokens_and_else_stands() -> None:
    assert Budget(DefaultRate(0.1), 5) == Budget(tokens=5)
    assert Budget(DefaultRate(0.1)) == Budget(0.1)
    assert repr(Budget(DefaultRate(0.1))) == "Budget(rate=0.1, tokens=None)"


def test_exceeding() -> None:
    assert Budget(0.3).exceeds(Budget(0.2))
    assert not Budget(0.2).exceeds(Budget(0.2))
    assert Budget(tokens=3).exceeds(Budget(tokens=2))
    assert not Budget(tokens=10**9).exceeds(Budget(0.01))


@pytest.mark.parametrize("budget", [Budget(rate=0.3), Budget(tokens=5)])
@pytest.mark.parametrize("context_len", [None, 10])
@pytest.mark.parametrize(
    ("protected", "error", "message"),
    [
        ("x", TypeError, "protected must be an int, got 'x'"),
        (2.5, TypeError, "protected must be an int, got 2.5"),
        (True, TypeError, "protected must be an int, got True"),
        (-1, ValueError, "protected must be at least 0, got -1"),
    ],
)
def test_a_fraction_with_bad_protection(
    budget: Budget, context_len: int | None, protected: Any, error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        budget.fraction(context_len, protected=protected)
