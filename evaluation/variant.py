"""Define a variant: a policy that a comparison runs, with how it was built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from kvpolicy.evaluation.refusals import naming
from kvpolicy.policy import CachePolicy
from kvpolicy.registry import build_policy, parameters_of, registered


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
        """Check that the policy's layers exist in a model; a ValueError begins with its label."""
        with naming(self.label):
            self.policy.check_model(num_layers)
