"""Parts with one thing about them changed."""

from collections.abc import Callable
from typing import Any

import attrs


def odd(base: Any, **members: Any) -> Any:
    """A kind of part with other members."""
    return attrs.frozen(type(f"Odd{base.__name__}", (base,), members))


def with_property(base: Any, name: str, value: object) -> Any:
    """A kind of part of which one property has a value."""
    return odd(base, **{name: property(lambda self: value)})


def with_method(base: Any, name: str, change: Callable[[Any], Any]) -> Any:
    """A kind of part of which one method's value is changed."""

    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        return change(getattr(base, name)(self, *arguments, **named))

    return odd(base, **{name: method})
