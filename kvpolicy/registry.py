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

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint
from typing import Any

from kvpolicy.assignments import PartOption
from kvpolicy.interfaces import KVSelector, PropagationPolicy, Scorer
from kvpolicy.names import GROUP, check_known, entries, name_of_known, said
from kvpolicy.policy import CachePolicy

Part = CachePolicy | Scorer | KVSelector | PropagationPolicy

KINDS: dict[str, type] = {
    "policy": CachePolicy,
    "scorer": Scorer,
    "selector": KVSelector,
    "propagation": PropagationPolicy,
}
# The parts of a composed policy by default: SnapKV's.
PARTS = {
    "scorer": "window_max_pool_scorer",
    "selector": "gqa_group_selector",
    "propagation": "pass_all_propagation",
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


def name_of(name: str, kind: str = "policy") -> str:
    """Return the registered name for a policy's or part's name as a user may write it.

    ``-`` counts as ``_``, and a part's kind at the end may be left out. Case and ``_`` do not count
    if only one name is meant, so that a class's name is understood. A name that is unknown is
    returned, for the error message.

    Example:
        >>> name_of("key-norm", "scorer"), name_of("ExpectedAttention")
        ('key_norm_scorer', 'expected_attention')
    """
    return name_of_known(name, kind, registered(kind))


def check_names(asked: Mapping[str, Iterable[str]]) -> None:
    """Check that the names of each kind are registered, as `name_of` understands them.

    Raises:
        UnknownPolicyError: See `kvpolicy.names.check_known`.
    """
    check_known(asked, {kind: registered(kind) for kind in asked})


def factory_of(name: str, kind: str = "policy") -> Callable[..., Part]:
    """Look up a policy's or part's factory by its name, see `name_of` and `check_names`."""
    check_names({kind: [name]})
    return registered(kind)[name_of(name, kind)]


def parameters_of(factory: Callable[..., Any]) -> dict[str, Any]:
    """Return the keyword parameters of a policy's or part's factory, with their default values.

    A default may be `inspect.Parameter.empty`. A signature that cannot be read has no parameters.
    """
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return {}
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {each.name: each.default for each in parameters if each.kind in by_name}


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
    return factory_of(name, kind)(**parameters)


def build_policy(name: str, **parameters: Any) -> CachePolicy:
    """Build a policy by its registered name; parameters that are None count as not given.

    Example:
        >>> build_policy("snapkv", retention_rate=0.2, tsp_rate=None).selector.budget
        Budget(rate=0.2, tokens=None)
    """
    given = {key: value for key, value in parameters.items() if value is not None}
    factory = factory_of(name)
    _check_parameters(f"policy {name}", given, parameters_of(factory))
    policy = factory(**given)
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
    """Build a policy from registered parts by kind; missing ones are SnapKV's.

    Every part takes those of the ``shared`` values that it has parameters for.

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
