"""Turns a policy into JSON data and back, so that a saved cache can name its policy."""

from importlib import import_module
from typing import Any

import attrs

from kvpolicy.decoding import DecodingEviction
from kvpolicy.interfaces import KVSelector, PropagationPolicy, Scorer
from kvpolicy.policy import CachePolicy
from kvpolicy.registry import Part, registered
from kvpolicy.repetition import Repetition

Description = dict[str, Any]


def describe(part: Part) -> Description:
    """Turn a policy or a policy part into JSON data: its class and fields, nested parts included.

    Two parts are equal if their descriptions are equal. `from_description` builds the policy again.

    Example:
        >>> from kvpolicy.policies import GQAGroupSelector
        >>> describe(GQAGroupSelector(retention_tokens=64, window_size=4))["type"]
        'gqa_group_selector'
    """
    # Only classes are looked up, since other callables may have no hash.
    names = {each: name for name, each in registered().items() if isinstance(each, type)}
    described: Description = _described(part, names)
    return described


def _described(value: Any, names: dict[Any, str]) -> Any:
    if attrs.has(type(value)):
        kind = type(value)
        fields = {
            each.name: _described(getattr(value, each.name), names)
            for each in attrs.fields(kind)
            if each.init  # fields computed from these are computed again
        }
        unregistered = f"{kind.__module__}:{kind.__qualname__}"
        return {"type": names.get(kind, unregistered), "fields": fields}
    if isinstance(value, (list, tuple)):
        return [_described(each, names) for each in value]
    if isinstance(value, float):
        return float(value)  # default rates are written like others
    if value is None or isinstance(value, (str, int)):
        return value
    return {"type": "repr", "repr": repr(value)}


def from_description(description: Description) -> CachePolicy:
    """Build a policy from the data that `describe` returned.

    Only registered parts and this package's own parts are built, so that a file cannot name code to
    run.

    Raises:
        ValueError: The description is not a policy's; or a part is not registered, or has a field
            that plain data cannot express.

    Example:
        >>> from kvpolicy.policies import FastKV
        >>> from_description(describe(FastKV(tsp_layer=3))) == FastKV(tsp_layer=3)
        True
    """
    built = _built(description, registered())
    if not isinstance(built, CachePolicy):
        raise ValueError(f"description must be that of a CachePolicy, got {built!r}")
    return built


def _own_class(kind: str) -> object:
    """Find a kvpolicy policy or part class by the text ``module:name``; None if there is none."""
    module, _, name = kind.partition(":")
    if not module.startswith("kvpolicy."):
        return None
    try:
        found: object = getattr(import_module(module), name, None)
    except ImportError:
        return None
    parts = (CachePolicy, DecodingEviction, Repetition, Scorer, KVSelector, PropagationPolicy)
    return found if isinstance(found, type) and issubclass(found, parts) else None


def _built(value: Any, known: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return tuple(_built(each, known) for each in value)
    if not isinstance(value, dict):
        return value
    kind, fields = str(value.get("type")), value.get("fields")
    factory = known.get(kind) or _own_class(kind)
    if not isinstance(factory, type) or not isinstance(fields, dict):
        raise ValueError(
            f"every part of a described policy must be registered under kvpolicy.policies, got "
            f"{kind!r}"
        )
    parts = {name: _built(each, known) for name, each in fields.items()}
    try:
        if issubclass(factory, CachePolicy):
            # A subclass may have a signature of its own: the fields are those of an attrs class.
            base: Any = next(each for each in factory.__mro__ if "__attrs_attrs__" in vars(each))
            policy = factory.__new__(factory)
            base.__init__(policy, **parts)
            return policy
        return factory(**parts)
    except TypeError as error:
        raise ValueError(f"the description of {kind} must fit its fields: {error}") from error
