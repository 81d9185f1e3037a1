"""The registry: finds every installed policy and part by name.

Anything under the entry-point group ``kvpolicy.policies`` is registered, the package's own methods
and third parties' alike::

    [project.entry-points."kvpolicy.policies"]
    my_scorer = "my_package:MyScorer"

An entry is a class (or any callable) that builds a part or a whole policy without arguments; the
object that it builds decides its kind. The command line and the contract tests find all entries
here. An entry that cannot be loaded, or that builds something else, is left out with one warning,
so that a broken package does not take away the other entries.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from kvpolicy.checks import check_kind
from kvpolicy.errors import UnknownPolicyError
from kvpolicy.interfaces import KVSelector, PropagationPolicy, Scorer
from kvpolicy.nearest import said
from kvpolicy.policy import CachePolicy

GROUP = "kvpolicy.policies"

Part = CachePolicy | Scorer | KVSelector | PropagationPolicy

_KINDS: dict[str, type] = {
    "policy": CachePolicy,
    "scorer": Scorer,
    "selector": KVSelector,
    "propagation": PropagationPolicy,
}


def registered(kind: str | None = None) -> dict[str, Callable[..., Part]]:
    """Return the registered policies' or parts' factories by name, in alphabetical order.

    Args:
        kind: ``"policy"``, ``"scorer"``, ``"selector"`` or ``"propagation"``; None for all.

    Returns:
        A new dict from name to factory.

    Raises:
        ValueError: ``kind`` is none of these.

    Warns:
        UserWarning: An entry is broken and left out; once in a process.

    Example:
        >>> list(registered("selector"))[:4]
        ['adaptive_head', 'critical', 'first_layers_whole', 'first_tokens_whole']
    """
    if kind is not None and kind not in list(_KINDS):
        raise ValueError(f"kind must be one of {', '.join(_KINDS)}, got {kind!r}")
    found = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda each: each.name):
        try:
            factory = entry.load()
            kind_found = kind_of(factory)
        except Exception as error:  # whatever another package's code raises
            _warn_of(entry, f"{type(error).__name__}: {error}")
            continue
        if kind is None or kind_found == kind:
            found[entry.name] = factory
    return found


@functools.cache
def _warn_of(entry: EntryPoint, reason: str) -> None:
    """Warn, once per process, that a plug-in's entry point cannot be loaded."""
    dist = getattr(entry, "dist", None)
    package = f" of {dist.name}" if dist else ""
    warnings.warn(
        f"entry {entry.name} = {getattr(entry, 'value', '?')!r}{package} in {GROUP} is left out, "
        f"since it does not build a policy or part: {reason}",
        stacklevel=4,
    )


def kind_of(factory: Callable[..., Part]) -> str:
    """Return whether a factory builds a policy, scorer, selector or propagation policy.

    Raises:
        TypeError: The factory cannot be called without arguments, or builds no part of a policy.
    """
    if callable(factory):
        built = factory()
        for kind, base in _KINDS.items():
            if isinstance(built, base):
                return kind
    bases = ", ".join(base.__name__ for base in _KINDS.values())
    raise TypeError(f"an entry of {GROUP} must build a {bases}, got {factory!r}")


def build(name: str, kind: str = "policy", **parameters: Any) -> Part:
    """Build a registered policy or part by its name.

    Args:
        name: A name from `registered`; ``-`` counts as ``_``.
        kind: The kind that the part must have.
        parameters: Passed on to the factory.

    Raises:
        TypeError: ``name`` is not a str.
        UnknownPolicyError: Nothing of that kind has the name; lists what has.

    Example:
        >>> build("snapkv", retention_rate=0.2).selector.budget
        Budget(rate=0.2, tokens=None)
    """
    check_names({kind: [name]})
    return registered(kind)[name.replace("-", "_")](**parameters)


def check_names(asked: Mapping[str, Iterable[str]]) -> None:
    """Check that policies and parts are registered; ``-`` in their names counts as ``_``.

    Args:
        asked: The names by kind, such as ``{"policy": ["fastkv"], "scorer": ["last_query"]}``.

    Raises:
        TypeError: A name is not a str.
        UnknownPolicyError: Nothing of its kind has a name; tells all such names, for each the
            nearest that is known, and all that are known.
    """
    wrong = []
    for kind, names in asked.items():
        known = registered(kind)
        unknown = []
        for name in dict.fromkeys(names):
            check_kind("name", name, str)
            if name.replace("-", "_") not in known:
                unknown.append(said(name, known, repr(name)))
        if unknown:
            wrong.append(f"no {kind} is named {' or '.join(unknown)}; known: {', '.join(known)}")
    if wrong:
        raise UnknownPolicyError("; ".join(wrong))
