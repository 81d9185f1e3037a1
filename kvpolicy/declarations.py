"""Decides whether a property that a part's class declares still holds in a subclass."""

import functools
from typing import Any

import attrs

from kvpolicy.interfaces import Part

# The methods that each declaration is about: a class that overrides one must declare again.
ABOUT = {"accumulates": ("score", "update", "state_size", "num_queries"), "keeps_all": ("select",)}


def still_holds(part: Part, declaration: str, *methods: str) -> bool:
    """True if no subclass overrides the methods that a base class's declared property is about.

    A declaration that a class inherits may be false for a method that the class overrides.
    """
    kind: object = type(part)
    return _holds_in(kind, declaration, methods)


@functools.lru_cache(maxsize=256)
def _holds_in(kind: Any, declaration: str, methods: tuple[str, ...]) -> bool:
    classes = kind.__mro__

    def defined(name: str) -> int:
        return next(place for place, each in enumerate(classes) if name in vars(each))

    return defined(declaration) <= min(map(defined, methods))


def is_tested(part: Part) -> bool:
    """True if a part, and every part in it, comes with this library.

    The library's tests check what its parts return, so that nobody has to check it at every layer.
    """
    kind: Any = type(part)
    if not kind.__module__.startswith("kvpolicy."):
        return False
    inside: list[object] = []
    for field in attrs.fields(kind) if attrs.has(kind) else ():
        value = getattr(part, field.name)
        inside += value if isinstance(value, (tuple, list)) else [value]
    return all(is_tested(each) for each in inside if isinstance(each, Part))


def declares(part: Part, declaration: str) -> bool:
    """True if a property, one of `ABOUT`, is True and no subclass overrides what it is about."""
    declared: bool = getattr(part, declaration)
    return declared and still_holds(part, declaration, *ABOUT[declaration])
