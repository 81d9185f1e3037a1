"""Keeps earlier public names working for one version, with a `DeprecationWarning`.

Declares old names where they were: `Renamed` and `Moved` in a class body, `take_old_names` where
subclasses define them, `accepts_old` for names of arguments of an attrs class, `accepts_grouped`
for those that are in groups now, `by_name` for those that were given by position, `old_names` for
names of a module, `warn_of_word` for texts.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from operator import attrgetter
from typing import Any, TypeVar

import attrs

Class = TypeVar("Class", bound=type)


class EarlierWordWarning(DeprecationWarning):
    """Warns that a text, such as a policy's name, uses an earlier word; command lines print it."""


def _warn(old: str, new: str | None, *, above: int = 0) -> None:
    """Warn at the line that called this module, or at a line ``above`` callers further up."""
    instead = f"use {new}" if new else "since only the library itself needs it"
    level = 2
    while sys._getframe(level - 1).f_code.co_filename == __file__:
        level += 1
    warnings.warn(f"{old} is deprecated, {instead}", DeprecationWarning, stacklevel=level + above)


def warn_of_word(old: str, new: str) -> None:
    """Warn that a word was renamed, at the line outside of the package that used it."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("kvpolicy."):
        level, frame = level + 1, frame.f_back
    warnings.warn(f"{old} is deprecated, use {new}", EarlierWordWarning, stacklevel=level)


@contextlib.contextmanager
def words_told() -> Iterator[None]:
    """Print each `EarlierWordWarning` in a ``with`` block once, as a line on stderr."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", EarlierWordWarning)
        show, told = warnings.showwarning, set[str]()

        def tell(message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
            if not issubclass(category, EarlierWordWarning):
                show(message, category, *where, **more)
            elif str(message) not in told:
                told.add(str(message))
                print(f"warning: {message}", file=sys.stderr)

        warnings.showwarning = tell
        yield


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
            _warn(f"{self._owner.__name__}.{self._own_name}", self._name)
        classes = self._owner.__mro__
        found = next(vars(each)[self._name] for each in classes if self._name in vars(each))
        return found.__get__(instance, type(instance)) if hasattr(found, "__get__") else found


class Moved:
    """Descriptor for an attribute that has moved: its old name still works, with a warning.

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
        _warn(self._name, self._instead)
        return self._find(instance)


def take_old_names(cls: type, names: Mapping[str, str]) -> None:
    """Make a renamed method that a subclass overrides available under its old and new names.

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
            # Two callers up, above the base's function and the metaclass's, is the class statement.
            _warn(f"{cls.__name__}.{old}", new, above=2)
        setattr(cls, given, definer[given])  # a class beside the bases may have defined it
        alias = Renamed(given, warns=missing == old)
        alias.__set_name__(cls, missing)
        setattr(cls, missing, alias)


def accepts_old(**names: str) -> Callable[[Class], Class]:
    """Let an attrs class accept arguments by old names, and attributes be read by them.

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
                _warn(f"{old}= of {cls.__name__}", f"{new}=")
                # `attrs.evolve` passes all fields by their new names, so changes must come first.
                given[new] = given.pop(old)
            init(self, *args, **given)

        cls.__init__ = renamed  # type: ignore[misc]
        for old, new in names.items():
            alias = Renamed(new)
            alias.__set_name__(cls, old)
            setattr(cls, old, alias)
        cls.__earlier_arguments__ = names  # type: ignore[attr-defined]
        return cls

    return renaming


def earlier_arguments(factory: object) -> Mapping[str, str]:
    """Return a dict from the old names of a class's arguments to the present ones."""
    names: Mapping[str, str] = getattr(factory, "__earlier_arguments__", {})
    return names


def in_new_words(
    factory: object, given: Mapping[str, Any], *, warns: bool = True
) -> dict[str, Any]:
    """Return arguments for a class, read from a text, under their present names.

    Args:
        factory: What takes them, such as a class with `accepts_old`.
        given: The arguments by name.
        warns: Whether an old name is told.
    """
    names = earlier_arguments(factory)
    for old, new in names.items():
        if warns and old in given:
            warn_of_word(f"{old} of {getattr(factory, '__name__', factory)}", new)
    return {names.get(name, name): value for name, value in given.items()}


def by_name(order: str) -> Callable[[Class], Class]:
    """Let the constructor of an attrs class accept keyword-only arguments by position, as before.

    Args:
        order: The names of the arguments in the order of the earlier signature, with blanks.

    Raises:
        TypeError: When the class is called with more arguments by position than ``order`` has, with
            one by name as well, or with others behind the one that comes first now and did not.
    """
    earlier = order.split()

    def accepting(cls: Class) -> Class:
        init = cls.__init__  # type: ignore[misc]
        fields = attrs.fields(cls)
        now = [each.alias for each in fields if each.init and not each.kw_only]

        @functools.wraps(init)
        def positional(self: object, *args: Any, **given: Any) -> None:
            names = earlier[: len(args)]
            # Where another argument came first, it was not a fraction but a layer, or layers.
            same = now[:1] == earlier[:1]
            moved = bool(args and now) and not same and isinstance(args[0], float)
            if (args and not (same or moved)) or len(args) > len(now):
                named = ", ".join(f"{name}=" for name in names if name not in now or not same)
                if moved:
                    raise TypeError(
                        f"{cls.__name__} takes 1 positional argument, {now[0]}; give the others "
                        f"as keyword arguments, as in {named}, got {len(args)} positional "
                        "arguments"
                    )
                if len(names) == len(args):  # with more of them Python raises an error
                    _warn(f"giving {named} of {cls.__name__} by position", "the names")
                    init(self, **dict(zip(names, args, strict=True)), **given)
                    return
            init(self, *args, **given)

        cls.__init__ = positional  # type: ignore[misc]
        return cls

    return accepting


def accepts_grouped(order: str = "", /, **groups: type) -> Callable[[Class], Class]:
    """Let an attrs class accept fields by their own names that are now in groups.

    A call without old names costs no check: the constructor itself refuses them first.

    Args:
        order: The names of the arguments that could be given by position behind those that still
            can, with blanks.
        groups: The attrs class of each field that is a group. The old names are its fields'.
    """
    found = {each.name: group for group, kind in groups.items() for each in attrs.fields(kind)}

    def grouping(cls: Class) -> Class:
        init = cls.__init__  # type: ignore[misc]
        fields = [each for each in attrs.fields(cls) if each.init and not each.kw_only]
        count, earlier = len(fields), order.split()

        @functools.wraps(init)
        def grouped(self: object, *args: Any, **given: Any) -> None:
            try:
                init(self, *args, **given)
                return
            except TypeError:
                late = dict(zip(earlier, args[count:], strict=False))
                wrong = late.keys() & given.keys() or len(args) > count + len(earlier)
                if wrong or not (late or found.keys() & given.keys()):
                    raise
            for name in late.keys() - found.keys():
                _warn(f"giving {name}= of {cls.__name__} by position", "the name")
            given = _in_groups(cls.__name__, groups, found, {**late, **given})
            init(self, *args[:count], **given)

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
    """Return constructor arguments with old ungrouped names moved into their groups."""
    changes: dict[str, dict[str, Any]] = {}
    for name in (each for each in given if each in found):
        group = found[name]
        _warn(f"{name}= of {owner}", f"{group}={groups[group].__name__}({name}=...)")
        changes.setdefault(group, {})[name] = given[name]
    kept = {name: value for name, value in given.items() if name not in found}
    for group, of_group in changes.items():
        # `attrs.evolve` passes the unchanged group, so changes must come first.
        before: Any = kept.get(group)
        kept[group] = attrs.evolve(before, **of_group) if before else groups[group](**of_group)
    return kept


def old_names(module: str, names: Mapping[str, str], *, above: int = 0) -> Callable[[str], Any]:
    """Make a module-level ``__getattr__`` that finds renamed or moved names by old names.

    Args:
        module: The module's ``__name__``.
        names: The new name of each old one, with its module if that is another one.
        above: How many calls lie between this function and the code that reads the name.
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, _, new = names[name].rpartition(".")
        home = home or module
        _warn(f"{module}.{name}", f"{home}.{new}", above=above)
        return getattr(import_module(home), new)

    return find
