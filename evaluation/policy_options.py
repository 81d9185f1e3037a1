"""What a command line says about policies, before a policy is built; without torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from kvpolicy.assignments import PartOption, parse_assignments
from kvpolicy.checks import check_count
from kvpolicy.names import check_declared

# Parameters that have an option of their own.
OWN_OPTIONS = {
    "retention_rate": "--rate",
    "retention_tokens": "--retention-tokens",
    "protect": "--protect",
    "decoding": "--decoding-tokens",
}


@attrs.frozen(kw_only=True)
class PolicyOptions:
    """The policies that a command line asks for, and what they keep of prompts and answers.

    Args:
        names: Registered methods; none asks for the command's own, or for a composition alone.
        rates: Fractions of the context to keep.
        tokens: Numbers of tokens to keep, in place of rates.
        parameters: Set for every policy and part that takes them.
        parts: Of a composition, by kind, such as ``"scorer"``.
        decoding_tokens: Tokens that a layer keeps while an answer is decoded; None for all.
        decoding_every: Decoded tokens between two evictions; None for the policy's own.
    """

    names: tuple[str, ...] = ()
    rates: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()
    parameters: dict[str, Any] = attrs.field(factory=dict)
    parts: dict[str, PartOption] = attrs.field(factory=dict)
    decoding_tokens: int | None = None
    decoding_every: int | None = None

    def __attrs_post_init__(self) -> None:
        if self.rates and self.tokens:
            raise ValueError("at most one of --rate and --retention-tokens may be given, got both")
        if self.decoding_every is not None and self.decoding_tokens is None:
            raise ValueError(
                "--decoding-tokens must be given with --decoding-every, got --decoding-every "
                f"{self.decoding_every} alone"
            )
        for option, value in (
            ("--decoding-tokens", self.decoding_tokens),
            ("--decoding-every", self.decoding_every),
        ):
            if value is not None:
                check_count(option, value, minimum=1)
        parts = {kind: [part.name] for kind, part in self.parts.items()}
        check_declared({"policy": self.names, **parts})

    @staticmethod
    def given(
        *,
        policy: Sequence[str] | None = None,
        rate: Sequence[float] | None = None,
        retention_tokens: Sequence[int] | None = None,
        protect: int | None = None,
        assignments: Sequence[str] | None = None,
        decoding_tokens: int | None = None,
        decoding_every: int | None = None,
        **parts: str | None,
    ) -> PolicyOptions:
        """Return what the texts and numbers of a command line say; see `PolicyOptions`.

        Commas may separate ``policy``; ``assignments`` are ``"name=value"``; ``parts`` are by kind
        ``"name"`` or ``"name:parameter=value,..."``.
        """
        parameters = parse_assignments(assignments or (), "--set")
        for name, option in OWN_OPTIONS.items():
            if name in parameters:
                raise ValueError(f"{name} must be given by {option}, got --set {name}")
        if protect is not None:
            parameters["protect"] = protect
        return PolicyOptions(
            names=split_names(policy or (), "--policy"),
            rates=tuple(dict.fromkeys(rate or ())),
            tokens=tuple(dict.fromkeys(retention_tokens or ())),
            parameters=parameters,
            parts={
                kind: PartOption.parse(text, f"--{kind}")
                for kind, text in parts.items()
                if text is not None
            },
            decoding_tokens=decoding_tokens,
            decoding_every=decoding_every,
        )


def split_names(names: Iterable[str], option: str) -> tuple[str, ...]:
    """Split command-line names that may be repeated or comma-separated; return each once.

    Example:
        >>> split_names(["snapkv, fastkv", "h2o"], "--policy")
        ('snapkv', 'fastkv', 'h2o')
    """
    found = []
    for each in names:
        for name in each.split(","):
            if not name.strip():
                raise ValueError(f"{option} must be names separated by commas, got {each!r}")
            found.append(name.strip())
    return tuple(dict.fromkeys(found))
