"""Build the policies that a comparison runs, from registered names and retention rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from kvpolicy.evaluation.refusals import naming
from kvpolicy.policy import CachePolicy
from kvpolicy.registry import build_policy, factory_of, name_of, parameters_of, registered


@attrs.frozen
class Variant:
    """A policy to compare or run, with its name and the arguments it was built from.

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
        """Its name, the layer of its drop if one was set, and its retention: unique in a table."""
        layer = self.parameters.get("tsp_layer")
        name = self.name if layer is None else f"{self.name}@{layer}"
        if self.retention_tokens is not None:
            return f"{name} {self.retention_tokens} tokens"
        return name if self.retention_rate is None else f"{name} {self.retention_rate:g}"

    def as_data(self) -> dict[str, Any]:
        """Return how it was built as a dict for JSON."""
        return {
            "policy": self.name,
            "retention_rate": self.retention_rate,
            "retention_tokens": self.retention_tokens,
            "parameters": dict(self.parameters),
        }

    def at_layers(self, layers: Sequence[int]) -> list[Variant]:
        """Return the policy with its drop at each of some layers; itself if it has no such layer.

        Raises:
            ValueError: The policy refuses a layer.
        """
        factory = registered("policy").get(self.name)  # none of a composition
        if factory is None or "tsp_layer" not in parameters_of(factory):
            return [self]
        found = []
        for layer in layers:
            parameters = {**self.parameters, "tsp_layer": layer}
            policy = build_policy(self.name, **parameters)
            found.append(attrs.evolve(self, policy=policy, parameters=parameters))
        return found

    def check_model(self, num_layers: int) -> None:
        """Check that the policy's layers exist in a model, see `CachePolicy.check_model`.

        Raises:
            ValueError: The policy does not fit the model; the message begins with its label.
        """
        with naming(self.label):
            self.policy.check_model(num_layers)


def leaves_layer_open(known: Mapping[str, Any]) -> bool:
    """True if a policy's ``tsp_layer`` is None by default, and so depends on the model.

    Args:
        known: The policy's parameters and their defaults.
    """
    return known.get("tsp_layer", 0) is None


def retention(rate: float | None, tokens: int | None, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return policy arguments that set how many tokens to keep, by a rate or a token count.

    A default TSP rate below ``rate`` is raised to it.

    Args:
        rate: Fraction of the context to keep; None for the policy's own.
        tokens: Tokens to keep, in place of a rate.
        known: The policy's parameters and their defaults.
    """
    if tokens is not None:
        return {"retention_tokens": tokens}
    if rate is None:
        return {}
    passed = known.get("tsp_rate")
    raised = {"tsp_rate": rate} if isinstance(passed, float) and passed < rate <= 1.0 else {}
    return {"retention_rate": rate, **raised}


def variants(
    names: Sequence[str] | None,
    rates: Sequence[float],
    *,
    tsp_layer: int | None = None,
) -> list[Variant]:
    """Build registered policies at every retention rate; policies without a rate only once.

    A policy that drops tokens in prefill cannot keep more of them than it passes on: where the
    retention rate is above its default TSP rate, the TSP rate is raised to it.

    Args:
        names: Of registered policies, see `kvpolicy.registry.name_of`; None for all.
        rates: Fractions of the context to keep, in (0, 1].
        tsp_layer: For the policies whose own default is no fixed layer; None for their default.

    Raises:
        ValueError: A name is unknown or a value out of its range.

    Example:
        >>> [variant.label for variant in variants(["full_context", "fastkv"], [0.1, 0.2])]
        ['full_context', 'fastkv 0.1', 'fastkv 0.2']
    """
    chosen = []
    for name in dict.fromkeys(name_of(name) for name in (names or registered("policy"))):
        known = parameters_of(factory_of(name))
        for rate in dict.fromkeys(rates) if "retention_rate" in known else [None]:
            parameters = retention(rate, None, known)
            if tsp_layer is not None and leaves_layer_open(known):
                parameters["tsp_layer"] = tsp_layer
            chosen.append(Variant(name, build_policy(name, **parameters), rate, parameters))
    return chosen
