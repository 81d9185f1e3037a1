"""Which policies a comparison runs: registered names and retention rates, made into policies."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from kvpolicy.checks import check_kind
from kvpolicy.errors import UnknownPolicyError
from kvpolicy.policy import CachePolicy
from kvpolicy.registry import build, registered

# The paper's two rates, and one so low that the bundled model tells methods apart.
RATES = (0.02, 0.1, 0.2)


@attrs.frozen
class Variant:
    """A policy as a comparison runs it.

    Args:
        name: Its name, such as ``"fastkv"``.
        policy: The policy.
        retention_rate: The retention rate it was given; None for a policy that takes none.
        parameters: All that it was built with beyond its defaults.
        retention_tokens: The number of tokens it was given in place of a rate.
    """

    name: str
    policy: CachePolicy
    retention_rate: float | None = None
    parameters: Mapping[str, Any] = attrs.field(factory=dict)
    retention_tokens: int | None = None

    @property
    def label(self) -> str:
        """Name and retention, unique in a comparison."""
        if self.retention_tokens is not None:
            return f"{self.name} {self.retention_tokens} tokens"
        return self.name if self.retention_rate is None else f"{self.name} {self.retention_rate:g}"


def parameters_of(factory: Callable[..., Any]) -> dict[str, Any]:
    """The parameters a factory takes by name, with their defaults.

    Returns:
        `inspect.Parameter.empty` where there is no default. Empty for a factory whose signature
        cannot be read; ``*args`` and ``**kwargs`` promise nothing and do not count.
    """
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return {}
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {each.name: each.default for each in parameters if each.kind in by_name}


def takes(name: str, parameter: str) -> bool:
    """Whether a registered policy takes a parameter of that name.

    Raises:
        ValueError: No policy has the name.
    """
    return parameter in parameters_of(_factory(name))


def build_policy(name: str, **parameters: Any) -> CachePolicy:
    """Build a registered policy from the parameters that are not None.

    Raises:
        ValueError: No policy has the name, it takes no parameter of that name, or a value is out
            of its range.

    Example:
        >>> build_policy("snapkv", retention_rate=0.2, tsp_rate=None).selector.budget
        Budget(rate=0.2, tokens=None)
    """
    given = {key: value for key, value in parameters.items() if value is not None}
    known = parameters_of(_factory(name))
    for key in given:
        if key not in known:
            raise ValueError(
                f"policy {name} takes no {key}; it takes {', '.join(known) or 'no parameters'}"
            )
    policy = build(name, **given)
    assert isinstance(policy, CachePolicy)
    return policy


def variants(
    names: Sequence[str] | None = None,
    rates: Sequence[float] = RATES,
    *,
    tsp_layer: int | None = None,
) -> list[Variant]:
    """The registered policies at every retention rate; those that take no rate once.

    A policy that drops tokens in prefill cannot keep more of them than it passes on: where the
    retention rate is above its default TSP rate, the TSP rate is raised to it.

    Args:
        names: Of registered policies, ``-`` counting as ``_``; None for all.
        rates: Fractions of the context to keep, in (0, 1].
        tsp_layer: For the policies that have one; None for their default.

    Raises:
        ValueError: A name is unknown or a value out of its range.

    Example:
        >>> [variant.label for variant in variants(["full_context", "fastkv"], [0.1, 0.2])]
        ['full_context', 'fastkv 0.1', 'fastkv 0.2']
    """
    chosen = []
    for name in dict.fromkeys(_plain(name) for name in (names or registered("policy"))):
        known = parameters_of(_factory(name))
        for rate in dict.fromkeys(rates) if "retention_rate" in known else [None]:
            parameters: dict[str, Any] = {}
            if rate is not None:
                parameters["retention_rate"] = rate
                if isinstance(known.get("tsp_rate"), float) and known["tsp_rate"] < rate <= 1.0:
                    parameters["tsp_rate"] = rate
            if tsp_layer is not None and "tsp_layer" in known:
                parameters["tsp_layer"] = tsp_layer
            chosen.append(Variant(name, build_policy(name, **parameters), rate, parameters))
    return chosen


def _plain(name: str) -> str:
    check_kind("name", name, str)
    return name.replace("-", "_")


def _factory(name: str) -> Callable[..., Any]:
    known = registered("policy")
    if _plain(name) not in known:
        raise UnknownPolicyError(f"no policy is named {name!r}; known: {', '.join(known)}")
    return known[_plain(name)]
