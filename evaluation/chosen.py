"""Build the policies and compositions that a command line asks for."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from kvpolicy.decoding import DecodingEviction
from kvpolicy.evaluation.policy_options import PolicyOptions
from kvpolicy.evaluation.variant import Variant
from kvpolicy.names import said
from kvpolicy.policies.methods.method import Method, under_tokens
from kvpolicy.policy import CachePolicy
from kvpolicy.registry import (
    PARTS,
    Part,
    build_policy,
    check_names,
    compose,
    factory_of,
    name_of,
    parameters_of,
    registered,
)


def variants(names: Sequence[str] | None, rates: Sequence[float]) -> list[Variant]:
    """Build registered policies at every retention rate; policies without a rate only once.

    A policy that drops tokens in prefill cannot keep more of them than it passes on: where the
    retention rate is above its default TSP rate, the TSP rate is raised to it.

    Args:
        names: See `kvpolicy.registry.name_of`; None for all.
        rates: Fractions of the context to keep, in (0, 1]; one beyond is a ValueError.

    Example:
        >>> [variant.label for variant in variants(["full_context", "fastkv"], [0.1, 0.2])]
        ['full_context', 'fastkv 0.1', 'fastkv 0.2']
    """
    return _methods(PolicyOptions(names=tuple(names or ())), rates)


def chosen_variants(options: PolicyOptions, rates: Sequence[float | None]) -> list[Variant]:
    """Build every policy that the command line asks for, once per retention rate or token count.

    The command's own ``rates`` are for where it says none. It is a ValueError if a name is unknown,
    a value out of its range, or an option is taken by none of the policies.
    """
    named = {kind: [part.name] for kind, part in options.parts.items()}
    check_names({"policy": options.names, **named})
    found = []
    if options.names or not options.parts:
        found += _methods(options, rates)
    if options.parts:
        found += _compositions(options, rates)
    _check_taken(options, found)
    tokens = options.decoding_tokens
    return found if tokens is None else _bounded(found, tokens, options.decoding_every)


def chosen_variant(options: PolicyOptions, default: str) -> Variant:
    """Build the one policy that the command line asks for, or else the default."""
    if options.names and options.parts:
        raise ValueError(
            f"--policy must be left out where parts are given, got {', '.join(options.names)}: "
            "parts make a policy of their own, and what is not given is SnapKV's"
        )
    for option, given in (
        ("--policy", options.names),
        ("--rate", options.rates),
        ("--retention-tokens", options.tokens),
    ):
        if len(set(given)) > 1:
            raise ValueError(
                f"{option} must be one here, got {', '.join(map(str, dict.fromkeys(given)))}; to "
                "hold several against each other, see kvpolicy compare"
            )
    if not (options.names or options.parts):
        options = attrs.evolve(options, names=(default,))
    (found,) = chosen_variants(options, (None,))
    return found


def _bounded(found: Sequence[Variant], tokens: int, every: int | None) -> list[Variant]:
    """Return policies that also evict while decoding, where their method can; one has to."""
    having = []
    for variant in found:
        rule = _decoding_rule(variant.policy, tokens, every)
        if rule is not None:
            parameters = {**variant.parameters, "decoding": str(rule)}
            policy = attrs.evolve(variant.policy, decoding=rule)
            variant = attrs.evolve(variant, policy=policy, parameters=parameters)
        having.append(variant)
    if all(each.policy.decoding is None for each in having):
        raise ValueError(
            "--decoding-tokens must be given with a policy that has a rule to evict by, got "
            f"{', '.join(each.name for each in found)}"
        )
    return having


def _decoding_rule(policy: CachePolicy, tokens: int, every: int | None) -> DecodingEviction | None:
    """Return a method's own rule, or a composition's scorer and selector; None if they cannot."""
    if isinstance(policy, Method):
        return policy.decoding_rule(tokens, every) if policy.has_decoding_rule else None
    selector, scorer = under_tokens(policy.selector, tokens), policy.scorer
    parts = [part for part in (selector, scorer) if part is not None]
    if selector is None or selector.decides_together or any(it.history_layers for it in parts):
        return None
    return DecodingEviction(scorer, selector, every=Method.every if every is None else every)


def _methods(options: PolicyOptions, rates: Sequence[float | None]) -> list[Variant]:
    found, factories = [], registered("policy")
    for name in dict.fromkeys(map(name_of, options.names or factories)):
        known = parameters_of(factories[name])
        further = {key: value for key, value in options.parameters.items() if key in known}
        for rate, tokens in _retentions(options, rates, known):
            merged = {**_retention(rate, tokens, known), **further}
            if "tsp_tokens" in further and "tsp_rate" not in further:
                merged.pop("tsp_rate", None)
            policy = _built(functools.partial(build_policy, name, **merged))
            found.append(Variant(name, policy, rate, merged, tokens))
    return found


def _compositions(options: PolicyOptions, rates: Sequence[float | None]) -> list[Variant]:
    """Build the policy composed from parts on the command line, once per retention rate."""
    known: dict[str, Any] = {}
    for factory in _factories(options):
        known |= parameters_of(factory)
    told = [part.parameters for part in options.parts.values()]
    if any("retention_rate" in each or "retention_tokens" in each for each in told):
        rates = (None,)
    found, name = [], _composed_name(options)
    for rate, tokens in _retentions(options, rates, known):
        shared = {**_retention(rate, tokens, known), **options.parameters}
        policy = _built(functools.partial(compose, options.parts, shared))
        described = {kind: str(getattr(policy, kind)) for kind in PARTS}
        found.append(Variant(name, policy, rate, described, tokens))
    return found


def _composed_name(options: PolicyOptions) -> str:
    """Return the parts that are given, by their registered names; no policy has such a name."""
    found = []
    for kind, part in options.parts.items():
        assigned = ",".join(f"{name}={value}" for name, value in part.parameters.items())
        found.append(name_of(part.name, kind) + (f":{assigned}" if assigned else ""))
    return "+".join(found)


def _factories(options: PolicyOptions) -> list[Callable[..., Part]]:
    """Return what makes the parts of a composition, SnapKV's where none is given."""
    named = {kind: part.name for kind, part in options.parts.items()}
    return [factory_of(name, kind) for kind, name in (PARTS | named).items()]


def _retentions(
    options: PolicyOptions, rates: Sequence[float | None], known: Mapping[str, Any]
) -> list[tuple[float | None, int | None]]:
    """Return (rate, token count) pairs to build a policy with; one or both of a pair are None."""
    if options.tokens and "retention_tokens" in known:
        return [(None, tokens) for tokens in dict.fromkeys(options.tokens)]
    if not options.tokens and "retention_rate" in known:
        return [(rate, None) for rate in dict.fromkeys(options.rates or rates)]
    return [(None, None)]


def _retention(rate: float | None, tokens: int | None, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that set what to keep; a default TSP rate below ``rate`` is raised."""
    if tokens is not None:
        return {"retention_tokens": tokens}
    if rate is None:
        return {}
    passed = known.get("tsp_rate")
    raised = {"tsp_rate": rate} if isinstance(passed, float) and passed < rate <= 1.0 else {}
    return {"retention_rate": rate, **raised}


def _built(build: Callable[[], CachePolicy]) -> CachePolicy:
    try:
        return build()
    except TypeError as error:  # such as half a layer
        raise ValueError(str(error)) from error


def _check_taken(options: PolicyOptions, found: Sequence[Variant]) -> None:
    """Raise ValueError if a given parameter is taken by none of the chosen policies."""
    names = dict.fromkeys(each.name for each in found)
    composed = _composed_name(options)
    factories = [registered("policy")[name] for name in names if name != composed]
    factories += _factories(options) if composed else []
    known = {name for factory in factories for name in parameters_of(factory)}
    wanted = {name: f"--set {name}" for name in options.parameters}
    wanted |= {"protect": "--protect"} if "protect" in wanted else {}
    wanted |= {"retention_rate": "--rate"} if options.rates else {}
    wanted |= {"retention_tokens": "--retention-tokens"} if options.tokens else {}
    wrong = [
        said(name, known, option) if option.startswith("--set") else option
        for name, option in wanted.items()
        if name not in known
    ]
    if wrong:
        raise ValueError(
            f"{' and '.join(wrong)} must name a parameter of a chosen policy, got none that takes "
            f"it among {', '.join(names)}; see kvpolicy policies"
        )
