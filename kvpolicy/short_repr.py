"""Writes parts and policies in short form for messages, without arguments at their defaults.

A policy's parts repeat most of its arguments, and most of these are defaults; a message that shows
all of them hides what it says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs


def brief(value: object, *, instead: Mapping[str, Any] | None = None) -> str:
    """Return a part as code, without the arguments that are at their defaults.

    Args:
        value: A part, or anything else.
        instead: What to show in the place of fields, by name.

    Returns:
        The ``repr`` of what is no attrs class; the class's name where there is not even a ``repr``.

    Example:
        >>> from kvpolicy.policies import GQAGroupSelector
        >>> brief(GQAGroupSelector(0.2)), brief(GQAGroupSelector(retention_tokens=64))
        ('GQAGroupSelector(retention_rate=0.2)', 'GQAGroupSelector(retention_tokens=64)')
    """
    kind = type(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(brief, value))}]"
    if not attrs.has(kind):
        bare = kind.__repr__ is object.__repr__
        return f"{kind.__name__}()" if bare else repr(value)
    fields = [each for each in attrs.fields(kind) if each.init and each.repr]
    given = {each.name: getattr(value, each.name) for each in fields} | dict(instead or {})
    # A field without a default, or with one that is made, is always shown.
    defaults = {
        each.name: each.default
        for each in fields
        if each.default is not attrs.NOTHING and not isinstance(each.default, attrs.Factory)  # type: ignore[arg-type]
    }
    return call(kind.__name__, given, defaults)


def call(name: str, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """Return a call as code, without the arguments that are at their defaults.

    A rate of None is left out: the number of tokens that took its place is there.

    Args:
        name: What is called.
        given: Arguments by name.
        defaults: Theirs, where they have any.
    """
    shown = (
        f"{key}={brief(value)}"
        for key, value in given.items()
        if not (key in defaults and _same(value, defaults[key]))
        and not (value is None and isinstance(defaults.get(key), float))
    )
    return f"{name}({', '.join(shown)})"


def _same(value: object, default: object) -> bool:
    try:
        return bool(value == default)
    except (RuntimeError, ValueError, TypeError):  # such as of tensors
        return False
