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
from importlib.metadata import EntryPoint
from typing import Any

from kvpolicy.interfaces import KVSelector, PropagationPolicy, Scorer
from kvpolicy.names import GROUP, check_known, entries, name_of_known
from kvpolicy.policy import CachePolicy

Part = CachePolicy | Scorer | KVSelector | PropagationPolicy

KINDS: dict[str, type] = {
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
        >>> list(registered("selector"))[:3]
        ['adaptive_head_selector', 'critical_selector', 'first_layers_whole_selector']
    """
    if kind is not None and kind not in list(KINDS):
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    found = {}
    for entry in entries():
        try:
            factory = entry.load()
            kind_found = kind_of(factory)
        except Exception as error:  # any error in another package's code
            _warn_of(entry, f"{type(error).__name__}: {error}")
            continue
        if kind is None or kind_found == kind:
            found[entry.name] = factory
    return dict(sorted(found.items()))


@functools.cache
def _warn_of(entry: EntryPoint, reason: str) -> None:
    """Warn, once per process, that a plug-in's entry point cannot be loaded."""
    dist = getattr(entry, "dist", None)
    package = f" of {dist.name}" if dist else ""
    warnings.warn(
        f"entry {entry.name} = {getattr(entry, 'value', '?')!r}{package} in {GROUP} is ignored, "
        f"since it does not build a policy or part: {reason}",
        stacklevel=4,
    )


def kind_of(factory: Callable[..., Part]) -> str:
    """Return the kind of what a factory builds: policy, scorer, selector or propagation policy.

    Raises:
        TypeError: The factory cannot be called without arguments, or builds no part of a policy.
    """
    if callable(factory):
        built = factory()
        for kind, base in KINDS.items():
            if isinstance(built, base):
                return kind
    bases = ", ".join(base.__name__ for base in KINDS.values())
    raise TypeError(f"an entry of {GROUP} must build a {bases}, got {factory!r}")


def build(name: str, kind: str = "policy", **parameters: Any) -> Part:
    """Build a registered policy or part by its name.

    Args:
        name: A name from `registered`, see `name_of`.
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
    return registered(kind)[name_of(name, kind)](**parameters)


def name_of(name: str, kind: str = "policy") -> str:
    """Return the registered name for a policy's or part's name as a user may write it.

    ``-`` counts as ``_``, and a part's kind at the end may be left out. Case and ``_`` do not count
    if only one name is meant, so that a class's name is understood. A name that is unknown is
    returned, for the error message.

    Args:
        name: A name.
        kind: The kind of what it names.

    Raises:
        TypeError: ``name`` is not a str.

    Example:
        >>> name_of("key-norm", "scorer"), name_of("ExpectedAttention")
        ('key_norm_scorer', 'expected_attention')
    """
    return name_of_known(name, kind, registered(kind))


def check_names(asked: Mapping[str, Iterable[str]]) -> None:
    """Check that policies and parts are registered, under names that `name_of` accepts.

    Args:
        asked: The names by kind, such as ``{"policy": ["fastkv"], "scorer": ["last_query"]}``.

    Raises:
        TypeError: A name is not a str.
        UnknownPolicyError: Nothing of its kind has a name; tells all such names, for each the
            nearest that is known, and all that are known.
    """
    check_known(asked, {kind: registered(kind) for kind in asked})
