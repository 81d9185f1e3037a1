"""Define a variant, a policy with how it was built, and say by its name why it is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs

from kvpolicy.policy import CachePolicy
from kvpolicy.registry import build_policy, parameters_of, registered


@attrs.frozen
class Variant:
    """A policy to compare or run, with its name and the arguments it was built from.

    Args:
        name: Such as ``"fastkv"``.
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
        """Return the policy with its drop at each of some layers; itself if it has none."""
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


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Put a policy's name before the message of a ValueError that a ``with`` block raises."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def in_users_words(reason: str, policy: CachePolicy | None, name: str) -> str:
    """Return the reason for a refusal with a policy's name in place of its classes.

    Errors write policies and their parts as Python does. A command line has named them otherwise.
    The policy is None if it could not be built.

    Example:
        >>> from kvpolicy.policies import SnapKV
        >>> in_users_words("layers [1, 2] of SnapKV(retention_rate=0.1)", SnapKV(), "snapkv 0.1")
        'layers 1, 2 of snapkv 0.1'
    """
    said = re.sub(r"\[(\d+(?:, \d+)*)\]", r"\1", _without_arguments(reason))
    if policy is not None:
        for part in (policy, policy.scorer, policy.selector, policy.propagation):
            said = re.sub(rf"\b{type(part).__name__}\b", lambda _: name, said)
    return " ".join(said.split())


def _without_arguments(text: str) -> str:
    """Remove the parenthesised arguments after a class name."""
    written, depth = "", 0
    for character in text:
        if character == "(" and (depth or re.search(r"\b[A-Z]\w*$", written)):
            depth += 1
        if not depth:
            written += character
        if character == ")" and depth:
            depth -= 1
    return written
