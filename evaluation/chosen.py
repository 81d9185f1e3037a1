"""Build the policies and compositions that a command line asks for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from kvpolicy.decoding import DecodingEviction
from kvpolicy.evaluation.policy_options import PolicyOptions
from kvpolicy.evaluation.variant import Variant, leaves_layer_open, retention
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

COMPOSITION = "composition"


def chosen_variants(
    options: PolicyOptions, rates: Sequence[float | None], *, tsp_layer: int | None = None
) -> list[Variant]:
    """Build every policy that the command line asks for, once per retention rate or token count.

    Args:
        options: What the command line says.
        rates: The command's own retention rates, where it says none.
        tsp_layer: For the policies whose own default is no fixed layer and that are not told
            another; None for their default.

    Raises:
        ValueError: A name is unknown, a value out of its range, or an option is taken by none of
            the policies.
    """
    named = {kind: [part.name] for kind, part in options.parts.items()}
    check_names({"policy": options.names, **named})
    found = []
    if options.names or not options.parts:
        found += _methods(options, rates, tsp_layer)
    if options.parts:
        found += _compositions(options, rates)
    _check_taken(options, found)
    tokens = options.decoding_tokens
    return found if tokens is None else bounded(found, options, tokens)


def bounded(found: Sequence[Variant], options: PolicyOptions, tokens: int) -> list[Variant]:
    """Return copies of policies that also evict while decoding, if their method can.

    Args:
        found: Policies without such a rule.
        options: What the command line says of the interval.
        tokens: Entries that layers keep.

    Raises:
        ValueError: None of them has a rule to go by.
    """
    having = []
    for variant in found:
        rule = decoding_rule(variant.policy, tokens, options.decoding_every)
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


def decoding_rule(policy: CachePolicy, tokens: int, every: int | None) -> DecodingEviction | None:
    """Make a policy's own rule for eviction while decoding; None if it cannot evict then.

    Args:
        policy: A method, or a composition: its scorer and its selector are the rule then.
        tokens: Entries that a layer keeps.
        every: Tokens from one choice to the next; None for the method's own.
    """
    if isinstance(policy, Method):
        return policy.decoding_rule(tokens, every) if policy.has_decoding_rule else None
    selector, scorer = under_tokens(policy.selector, tokens), policy.scorer
    parts = [part for part in (selector, scorer) if part is not None]
    if selector is None or selector.decides_together or any(it.history_layers for it in parts):
        return None
    return DecodingEviction(scorer, selector, every=Method.every if every is None else every)


def chosen_variant(
    options: PolicyOptions, default: str, *, tsp_layer: int | None = None
) -> Variant:
    """Build the one policy that the command line asks for.

    Args:
        options: What the command line says.
        default: The policy where it says none.
        tsp_layer: See `chosen_variants`.

    Raises:
        ValueError: More than one is asked for; else see `chosen_variants`.
    """
    if options.names and options.parts:
        raise ValueError(
            f"--policy must be left out where parts are given, got {', '.join(options.names)}: "
            "parts make a policy of their own, and what is not given is SnapKV's"
        )
    asked = [COMPOSITION] if options.parts else options.names
    for option, given in (
        ("--policy", dict.fromkeys(asked)),
        ("--rate", dict.fromkeys(options.rates)),
        ("--retention-tokens", dict.fromkeys(options.tokens)),
    ):
        if len(given) > 1:
            raise ValueError(
                f"{option} must be one here, got {', '.join(map(str, given))}; to hold several "
                "against each other, see kvpolicy compare"
            )
    if not asked:
        options = attrs.evolve(options, names=(default,))
    (found,) = chosen_variants(options, (None,), tsp_layer=tsp_layer)
    return found


def _methods(
    options: PolicyOptions, rates: Sequence[float | None], tsp_layer: int | None
) -> list[Variant]:
    found = []
    for name in _names(options):
        factory = registered("policy")[name]
        known = parameters_of(factory)
        further = {key: value for key, value in options.parameters.items() if key in known}
        if tsp_layer is not None and leaves_layer_open(known):
            further = {"tsp_layer": tsp_layer, **further}
        for rate, tokens in _retentions(options, rates, known):
            merged = {**retention(rate, tokens, known), **further}
            if "tsp_tokens" in further and "tsp_rate" not in further:
                merged.pop("tsp_rate", None)
            policy = _built(functools.partial(build_policy, name, **merged))
            found.append(Variant(name, policy, rate, merged, tokens))
    return found


def _names(options: PolicyOptions) -> list[str]:
    """Return the policy names given on the command line, each once; all if none is given."""
    names = options.names or tuple(registered("policy"))
    return list(dict.fromkeys(name_of(name) for name in names))


def _compositions(options: PolicyOptions, rates: Sequence[float | None]) -> list[Variant]:
    """Build the policy composed from parts on the command line, once per retention rate."""
    parts = {kind: _factory(kind, options) for kind in PARTS}
    known: dict[str, Any] = {}
    told: dict[str, dict[str, Any]] = {}
    for kind, factory in parts.items():
        known |= parameters_of(factory)
        told[kind] = options.parts[kind].parameters if kind in options.parts else {}
    if any("retention_rate" in each or "retention_tokens" in each for each in told.values()):
        rates = (None,)
    found = []
    for rate, tokens in _retentions(options, rates, known):
        shared = {**retention(rate, tokens, known), **options.parameters}
        policy = _built(functools.partial(compose, options.parts, shared))
        described = {kind: str(getattr(policy, kind)) for kind in PARTS}
        found.append(Variant(COMPOSITION, policy, rate, described, tokens))
    return found


def _factory(kind: str, options: PolicyOptions) -> Callable[..., Part]:
    return factory_of(options.parts[kind].name if kind in options.parts else PARTS[kind], kind)


def _retentions(
    options: PolicyOptions, rates: Sequence[float | None], known: Mapping[str, Any]
) -> list[tuple[float | None, int | None]]:
    """Return (rate, token count) pairs to build a policy with; one or both of a pair are None."""
    if options.tokens and "retention_tokens" in known:
        return [(None, tokens) for tokens in dict.fromkeys(options.tokens)]
    if not options.tokens and "retention_rate" in known:
        return [(rate, None) for rate in dict.fromkeys(options.rates or rates)]
    return [(None, None)]


def _built(build: Callable[[], CachePolicy]) -> CachePolicy:
    try:
        return build()
    except TypeError as error:  # such as half a layer
        raise ValueError(str(error)) from error


def _check_taken(options: PolicyOptions, found: Sequence[Variant]) -> None:
    """Raise ValueError if a given parameter is taken by none of the chosen policies."""
    known = set[str]()
    for each in found:
        if each.name == COMPOSITION:
            factories = [_factory(kind, options) for kind in PARTS]
        else:
            factories = [registered("policy")[each.name]]
        for factory in factories:
            known.update(parameters_of(factory))
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
        names = ", ".join(dict.fromkeys(each.name for each in found))
        raise ValueError(
            f"{' and '.join(wrong)} must name a parameter of a chosen policy, got none that takes "
            f"it among {names}; see kvpolicy policies"
        )
