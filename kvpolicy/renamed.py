"""Keeps the earlier names of public things working for one version, with a `DeprecationWarning`.

Declares old names where they were: `Renamed` and `Moved` in a class body, `take_old_names` where
subclasses define them, `accepts_old` for arguments of an attrs class, `accepts_grouped` for those
that are in groups now, `old_names` for names of a
module.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from operator import attrgetter
from typing import Any, TypeVar

import attrs

Class = TypeVar("Class", bound=type)


def _warn(old: str, new: str | None, stacklevel: int) -> None:
    instead = f"use {new}" if new else "since only the library itself needs it"
    warnings.warn(f"{old} is deprecated, {instead}", DeprecationWarning, stacklevel=stacklevel + 1)


class Renamed:
    """Descriptor that gives an attribute a second name: reading it reads the other name.

    It looks no further down than that class, so that ``super().old_name()`` ends.

    Args:
        name: The attribute's other name.
        warns: Whether this name is the deprecated one.
    """

    def __init__(self, name: str, *, warns: bool = True) -> None:
        self._name, self._warns = name, warns

    def __set_name__(self, owner: type, own_name: str) -> None:
        self._owner, self._own_name = owner, own_name

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is None:
            return self
        if self._warns:
            _warn(f"{self._owner.__name__}.{self._own_name}", self._name, stacklevel=2)
        classes = self._owner.__mro__
        found = next(vars(each)[self._name] for each in classes if self._name in vars(each))
        return found.__get__(instance, type(instance)) if hasattr(found, "__get__") else found


class Moved:
    """Descriptor that keeps the name of an attribute that is elsewhere now, and warns of it.

    Args:
        path: Where the attribute is now, such as ``attention.scaling``; names with an underscore
            are private.
        instead: What to use in its place; the path if None, nothing if the path is private.
    """

    def __init__(self, path: str, instead: str | None = None) -> None:
        private = any(each.startswith("_") for each in path.split("."))
        self._find = attrgetter(path)
        self._instead = instead or (None if private else path)

    def __set_name__(self, owner: type, own_name: str) -> None:
        self._name = f"{owner.__name__}.{own_name}"

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is None:
            return self
        _warn(self._name, self._instead, stacklevel=2)
        return self._find(instance)


def take_old_names(cls: type, names: Mapping[str, str]) -> None:
    """Make a renamed method or property that a subclass overrides available under both its names.

    To be called by the ``__init_subclass__`` of the base.

    Args:
        cls: The subclass.
        names: The new name of each old one; the base has both.
    """
    for old, new in names.items():
        definer = next(vars(each) for each in cls.__mro__ if {old, new} & vars(each).keys())
        if old in definer and new in definer:
            continue
        given, missing = (old, new) if old in definer else (new, old)
        if given == old:
            # Above this function, the base's own and that of the metaclass: the class statement.
            _warn(f"{cls.__name__}.{old}", new, stacklevel=4)
        setattr(cls, given, definer[given])  # a class beside the bases may have defined it
        alias = Renamed(given, warns=missing == old)
        alias.__set_name__(cls, missing)
        setattr(cls, missing, alias)


def accepts_old(**names: str) -> Callable[[Class], Class]:
    """Let the constructor of an attrs class accept arguments by their old names.

    Args:
        names: The new name of each old one.
    """

    def renaming(cls: Class) -> Class:
        init = cls.__init__  # type: ignore[misc]

        @functools.wraps(init)
        def renamed(self: object, *args: Any, **given: Any) -> None:
            for old, new in names.items():
                if old not in given:
                    continue
                _warn(f"{old}= of {cls.__name__}", f"{new}=", stacklevel=2)
                # `attrs.evolve` fills in all fields under their new names: changes go first.
                given[new] = given.pop(old)
            init(self, *args, **given)

        cls.__init__ = renamed  # type: ignore[misc]
        return cls

    return renaming


def accepts_grouped(**groups: type) -> Callable[[Class], Class]:
    """Let an attrs class accept and show fields by their own names that are in groups now.

    Args:
        groups: The attrs class of each field that is a group. The old names are its fields'.
    """
    found = {each.name: group for group, kind in groups.items() for each in attrs.fields(kind)}

    def grouping(cls: Class) -> Class:
        init = cls.__init__  # type: ignore[misc]

        @functools.wraps(init)
        def grouped(self: object, *args: Any, **given: Any) -> None:
            if not found.keys().isdisjoint(given):
                given = _in_groups(cls.__name__, groups, found, given)
            init(self, *args, **given)

        cls.__init__ = grouped  # type: ignore[misc]
        for name, group in found.items():
            moved = Moved(f"{group}.{name}")
            moved.__set_name__(cls, name)
            setattr(cls, name, moved)
        return cls

    return grouping


def _in_groups(
    owner: str, groups: Mapping[str, type], found: Mapping[str, str], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return constructor arguments with those by old names put into their groups."""
    changes: dict[str, dict[str, Any]] = {}
    for name in (each for each in given if each in found):
        group = found[name]
        _warn(f"{name}= of {owner}", f"{group}={groups[group].__name__}({name}=...)", stacklevel=3)
        changes.setdefault(group, {})[name] = given[name]
    kept = {name: value for name, value in given.items() if name not in found}
    for group, of_group in changes.items():
        # `attrs.evolve` gives the group as it was: changes go first.
        before: Any = kept.get(group)
        kept[group] = attrs.evolve(before, **of_group) if before else groups[group](**of_group)
    return kept


def old_names(
    module: str, names: Mapping[str, str], *, stacklevel: int = 2
) -> Callable[[str], Any]:
    """Make a module-level ``__getattr__`` that finds renamed or moved names by their old names.

    Args:
        module: The module's ``__name__``.
        names: The new name of each old one, with its module if that is another one.
        stacklevel: How many calls above the warning its reader is.
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, _, new = names[name].rpartition(".")
        home = home or module
        _warn(f"{module}.{name}", f"{home}.{new}", stacklevel)
        return getattr(import_module(home), new)

    return find
