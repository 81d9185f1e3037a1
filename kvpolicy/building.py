"""Builds policies from the names and values given on command lines and as model arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvpolicy.assignments import PartOption
from kvpolicy.interfaces import KVSelector, PropagationPolicy, Scorer
from kvpolicy.nearest import said
from kvpolicy.policy import CachePolicy
from kvpolicy.registry import Part, build, check_names, name_of, registered

# The parts of a composed policy by default: SnapKV's.
PARTS = {
    "scorer": "window_max_pool_scorer",
    "selector": "gqa_group_selector",
    "propagation": "pass_all_propagation",
}


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
    """Look up a policy's or part's factory by its registered name, see `name_of`.

    Raises:
        TypeError: ``name`` is not a str.
        UnknownPolicyError: Nothing of that kind has the name; lists the known names.
    """
    check_names({kind: [name]})
    return registered(kind)[name_of(name, kind)]


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
    _check_parameters(f"policy {name}", given, parameters_of(factory_of(name)))
    policy = build(name, **given)
    assert isinstance(policy, CachePolicy)
    return policy


def _check_parameters(what: str, given: Iterable[str], known: Mapping[str, Any]) -> None:
    """Raise ValueError if a policy or part is given parameters that it does not take."""
    wrong = [key for key in given if key not in known]
    if wrong:
        raise ValueError(
            f"{what} takes no {' or '.join(said(key, known) for key in wrong)}; it takes "
            f"{', '.join(known) or 'no parameters'}"
        )


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
    check_names({kind: [part.name] for kind, part in parts.items()})
    for kind, default in PARTS.items():
        told = parts.get(kind, PartOption(default))
        factory = factory_of(told.name, kind)
        known = parameters_of(factory)
        _check_parameters(f"--{kind} {told.name}", told.parameters, known)
        taken = {key: value for key, value in shared.items() if key in known}
        built[kind] = factory(**{**taken, **told.parameters})
    scorer, selector, propagation = built["scorer"], built["selector"], built["propagation"]
    assert isinstance(scorer, Scorer)
    assert isinstance(selector, KVSelector)
    assert isinstance(propagation, PropagationPolicy)
    needed = selector.needs_saliency or propagation.needs_saliency
    return CachePolicy(scorer if needed or "scorer" in parts else None, selector, propagation)
