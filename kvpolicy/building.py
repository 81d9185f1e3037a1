"""Builds policies from the names and values given on command lines and as model arguments."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from kvpolicy.checks import check_kind
from kvpolicy.errors import UnknownPolicyError
from kvpolicy.interfaces import KVSelector, PropagationPolicy, Scorer
from kvpolicy.policy import CachePolicy
from kvpolicy.registry import Part, build, registered

# What a composition has where nothing is named: SnapKV's.
PARTS = {"scorer": "window_max_pool", "selector": "gqa_group", "propagation": "pass_all"}


@attrs.frozen
class PartOption:
    """A policy part as written on a command line: its registered name and its parameters.

    Args:
        name: The name under which the part is registered.
        parameters: Values by name.
    """

    name: str
    parameters: dict[str, Any] = attrs.field(factory=dict)

    @staticmethod
    def parse(text: str, option: str) -> PartOption:
        """Parse a policy part from the text ``"name"`` or ``"name:parameter=value,..."``.

        Args:
            text: The text.
            option: Name of the option that the text belongs to, for messages.

        Raises:
            ValueError: See `parse_assignments`.
        """
        name, colon, rest = text.partition(":")
        assignments = rest.split(",") if colon else []
        return PartOption(name.strip(), parse_assignments(assignments, option))


def parse_assignments(assignments: Iterable[str], option: str) -> dict[str, Any]:
    """Parse texts such as ``"window_size=16"`` into a dict of values by name.

    Args:
        assignments: The texts.
        option: Name of the option that the texts belong to, for messages.

    Raises:
        ValueError: A text is not a name and a value.

    Example:
        >>> parse_assignments(["tsp_layer=none", "tsp_rate=0.5", "kernel_size=5"], "--set")
        {'tsp_layer': None, 'tsp_rate': 0.5, 'kernel_size': 5}
    """
    parsed: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = (each.strip() for each in assignment.partition("="))
        value = _value(text)
        if not (name.isidentifier() and equals) or value != value:
            raise ValueError(
                f"{option} must be NAME=VALUE, a finite number, true, false or none, got "
                f"{assignment!r}"
            )
        parsed[name] = value
    return parsed


def _value(text: str) -> Any:
    """Convert a parameter's command-line text to a number, bool or None; NaN if it is none."""
    named = {"none": None, "true": True, "false": False}
    if text.lower() in named:
        return named[text.lower()]
    try:
        value: float = int(text) if text.lstrip("+-").isdecimal() else float(text)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def parameters_of(factory: Callable[..., Any]) -> dict[str, Any]:
    """Return the keyword parameters of a policy's or part's factory, with their default values.

    Returns:
        The default of each parameter by name, `inspect.Parameter.empty` if it has none. Empty for a
        factory whose signature cannot be read; ``*args`` and ``**kwargs`` are left out.
    """
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return {}
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {each.name: each.default for each in parameters if each.kind in by_name}


def factory_of(name: str, kind: str = "policy") -> Callable[..., Part]:
    """Look up a policy's or part's factory by its registered name; ``-`` counts as ``_``.

    Raises:
        TypeError: ``name`` is not a str.
        UnknownPolicyError: Nothing of that kind has the name; lists the known names.
    """
    check_kind("name", name, str)
    known = registered(kind)
    if name.replace("-", "_") not in known:
        raise UnknownPolicyError(f"no {kind} is named {name!r}; known: {', '.join(known)}")
    return known[name.replace("-", "_")]


def build_policy(name: str, **parameters: Any) -> CachePolicy:
    """Build a policy by its registered name; parameters that are None count as not given.

    Raises:
        ValueError: No policy has the name, the policy takes no such parameter, or a value is out of
            its range.

    Example:
        >>> build_policy("snapkv", retention_rate=0.2, tsp_rate=None).selector.budget
        Budget(rate=0.2, tokens=None)
    """
    given = {key: value for key, value in parameters.items() if value is not None}
    known = parameters_of(factory_of(name))
    for key in given:
        if key not in known:
            raise ValueError(
                f"policy {name} takes no {key}; it takes {', '.join(known) or 'no parameters'}"
            )
    policy = build(name, **given)
    assert isinstance(policy, CachePolicy)
    return policy


def compose(parts: Mapping[str, PartOption], shared: Mapping[str, Any]) -> CachePolicy:
    """Build a policy from a registered scorer, selector and propagation policy.

    Args:
        parts: The parts by kind: ``"scorer"``, ``"selector"`` and ``"propagation"``. Missing ones
            are SnapKV's.
        shared: Further values by name, for every part that takes them.

    Raises:
        ValueError: A part is unknown, a part takes no such parameter, or a value is out of its
            range.

    Example:
        >>> print(compose({"scorer": PartOption("last_query")}, {"retention_rate": 0.2}).selector)
        GQAGroupSelector(retention_rate=0.2)
    """
    built: dict[str, Any] = {}
    for kind, default in PARTS.items():
        told = parts.get(kind, PartOption(default))
        factory = factory_of(told.name, kind)
        known = parameters_of(factory)
        for key in told.parameters:
            if key not in known:
                raise ValueError(
                    f"--{kind} {told.name} takes no {key}; it takes "
                    f"{', '.join(known) or 'no parameters'}"
                )
        taken = {key: value for key, value in shared.items() if key in known}
        built[kind] = factory(**{**taken, **told.parameters})
    scorer, selector, propagation = built["scorer"], built["selector"], built["propagation"]
    assert isinstance(scorer, Scorer)
    assert isinstance(selector, KVSelector)
    assert isinstance(propagation, PropagationPolicy)
    needed = selector.needs_saliency or propagation.needs_saliency
    return CachePolicy(scorer if needed or "scorer" in parts else None, selector, propagation)
