"""Writes parts and policies in short form for messages, without arguments at their defaults.

A policy's parts repeat most of its arguments, and most of these are defaults; messages that show
all of them are hard to read. Only rates are always shown: how much is kept is what a reader asks
first.
"""

from collections.abc import Mapping
from typing import Any

import attrs


def brief(value: object, *, instead: Mapping[str, Any] | None = None) -> str:
    """Return a policy part's repr, without arguments at their defaults other than rates.

    For an object of no attrs class it is its ``repr``, or the class's name if it defines none. The
    values in ``instead`` are shown in place of those of some fields.

    Example:
        >>> from kvpolicy.policies import GQAGroupSelector
        >>> brief(GQAGroupSelector()), brief(GQAGroupSelector(retention_tokens=64))
        ('GQAGroupSelector(retention_rate=0.1)', 'GQAGroupSelector(retention_tokens=64)')
    """
    kind = type(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(brief, value))}]"
    if not attrs.has(kind):
        bare = kind.__repr__ is object.__repr__
        return f"{kind.__name__}()" if bare else repr(value)
    fields = [each for each in attrs.fields(kind) if each.init and each.repr]
    given = {each.name: getattr(value, each.name) for each in fields} | dict(instead or {})
    # A field without a default, or whose default is computed, is always shown.
    defaults = {
        each.name: each.default
        for each in fields
        if each.default is not attrs.NOTHING and not isinstance(each.default, attrs.Factory)  # type: ignore[arg-type]
    }
    return call(kind.__name__, given, defaults)


def call(name: str, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """Return a constructor call as source code, without arguments at their default values.

    Arguments called ``..._rate`` are shown at their defaults too, as they are what a part keeps. A
    rate of None is left out: the number of tokens that took its place is there.
    """
    shown = (
        f"{key}={brief(value)}"
        for key, value in given.items()
        if not (key in defaults and _same(value, defaults[key]) and not _is_rate(key, value))
        and not (value is None and isinstance(defaults.get(key), float))
    )
    return f"{name}({', '.join(shown)})"


def _is_rate(name: str, value: object) -> bool:
    return name.endswith("_rate") and value is not None


def _same(value: object, default: object) -> bool:
    try:
        return bool(value == default)
    except (RuntimeError, ValueError, TypeError):  # such as those of tensors
        return False
