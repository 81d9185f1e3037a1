"""Checks arguments; error messages name the argument, the rule, and the value given."""

import numbers
from typing import Any

# Counts are compared with int64 tensors.
LARGEST = 2**63 - 1


def check_count(
    name: str, value: object, *, minimum: int = 0, maximum: int | None = LARGEST
) -> int:
    """Check that an argument is an int, and no bool, from ``minimum`` to ``maximum``; return it."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
    if maximum is not None and value > maximum:
        raise ValueError(f"{name} must be at most {maximum}, got {value}")
    return value


def check_kind(name: str, value: object, kind: type) -> None:
    """Raise TypeError unless an argument is an instance of the expected class."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__name__}, got {value!r}")


def as_tuple(name: str, items: str, value: Any) -> tuple[Any, ...]:
    """Convert an argument to a tuple; TypeError if it is no iterable of ``items``, as "numbers"."""
    try:
        return tuple(value)
    except TypeError:
        raise TypeError(f"{name} must be a sequence of {items}, got {value!r}") from None


def check_rate(name: str, value: object, *, zero: bool = False) -> float:
    """Check that an argument is a fraction in (0, 1], or also 0 if ``zero``; return it."""
    allowed = "[0, 1]" if zero else "(0, 1]"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"{name} must be a number in {allowed}, got {value!r} of type {type(value).__name__}"
        )
    if not 0.0 <= float(value) <= 1.0 or (value == 0 and not zero):
        raise ValueError(f"{name} must be in {allowed}, got {value}")
    return float(value)


def check_amount(name: str, value: object) -> float:
    """Check that an argument is a finite number of at least 0, and return it."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    if not 0.0 <= float(value) < float("inf"):
        raise ValueError(f"{name} must be at least 0 and finite, got {value}")
    return float(value)


def check_kernel_size(value: object) -> int:
    """Check that a pooling kernel size is an odd int of at least 1, and return it."""
    size = check_count("kernel_size", value, minimum=1)
    if size % 2 == 0:
        raise ValueError(
            f"kernel_size must be odd, so that every window has a middle, got {size}; "
            f"use {size - 1} or {size + 1}"
        )
    return size
