"""Declare the options that several commands share, so that they mean the same everywhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import attrs
import typer

from kvpolicy.building import PartOption, parse_assignments
from kvpolicy.checks import check_count

PolicyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        "--policies",
        "-p",
        metavar="NAMES",
        help="Names from `kvpolicy policies`, comma-separated or repeated.",
    ),
]
RateOption = Annotated[
    list[float] | None,
    typer.Option(
        "--rate",
        "--retention-rate",
        "-r",
        metavar="RATE",
        help="Fraction of the context that every layer keeps, in (0, 1], repeatable.",
    ),
]
RetentionTokensOption = Annotated[
    list[int] | None,
    typer.Option(
        "--retention-tokens",
        metavar="N",
        help="Tokens that every layer keeps, in place of a rate, repeatable.",
    ),
]
ProtectOption = Annotated[
    int | None,
    typer.Option(
        "--protect", metavar="N", help="First tokens of the context that are always kept."
    ),
]
DecodingTokensOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Tokens that every layer keeps while an answer is decoded, by the policy's own rule; "
        "default: all.",
    ),
]
DecodingEveryOption = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Decoded tokens from one choice to the next; default: the policy's own."
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="A parameter of what takes it, repeatable; such as window_size=16.",
    ),
]
ScorerOption = Annotated[
    str | None,
    typer.Option(
        "--scorer",
        metavar="PART",
        help="A composition's scorer: a name, or name:parameter=value,...",
    ),
]
SelectorOption = Annotated[
    str | None, typer.Option("--selector", metavar="PART", help="Its selector, likewise.")
]
PropagationOption = Annotated[
    str | None,
    typer.Option(
        "--propagation",
        metavar="PART",
        help="Its propagation policy, likewise; what is not named is SnapKV's.",
    ),
]
TSPLayerOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Layer after which FastKV drops tokens, from 0; default: the policy's own, or the one "
        "chosen for the bundled model.",
    ),
]
# Parameters that have an option of their own.
OWN_OPTIONS = {
    "retention_rate": "--rate",
    "retention_tokens": "--retention-tokens",
    "protect": "--protect",
    "decoding": "--decoding-tokens",
}


@attrs.frozen
class PolicyOptions:
    """The policies that a command line asks for.

    Args:
        names: Of registered policies; none for all, or for a composition alone.
        rates: KV retention rates; none for the command's own.
        tokens: Retentions in tokens, in place of rates.
        parameters: Further parameters, for what takes them, ``protect`` among them.
        parts: Parts of a composition by kind; empty where none is asked for.
        decoding_tokens: Tokens that layers keep of an answer; None for all.
        decoding_every: Decoded tokens from one choice to the next; None for each policy's own.
    """

    names: tuple[str, ...] = ()
    rates: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()
    parameters: dict[str, Any] = attrs.field(factory=dict)
    parts: dict[str, PartOption] = attrs.field(factory=dict)
    decoding_tokens: int | None = None
    decoding_every: int | None = None

    def refuse(self, command: str, **reasons: str) -> None:
        """Refuse options that make no sense for a command.

        Args:
            command: The command.
            reasons: For each field that must be empty, why: names, rates, tokens or parts.

        Raises:
            ValueError: One is given.
        """
        said = {
            "names": ("--policy", self.names),
            "rates": ("--rate", self.rates),
            "tokens": ("--retention-tokens", self.tokens),
            "parts": ("--scorer, --selector and --propagation", tuple(self.parts)),
        }
        for field, reason in reasons.items():
            option, given = said[field]
            if given:
                raise ValueError(
                    f"{option} must not be given to kvpolicy {command}: {reason}, got "
                    f"{', '.join(map(str, given))}"
                )


def policy_options(
    names: Sequence[str] | None = None,
    rates: Sequence[float] | None = None,
    tokens: Sequence[int] | None = None,
    protect: int | None = None,
    assignments: Sequence[str] | None = None,
    *,
    scorer: str | None = None,
    selector: str | None = None,
    propagation: str | None = None,
    decoding_tokens: int | None = None,
    decoding_every: int | None = None,
) -> PolicyOptions:
    """Read the options as they come from the command line.

    Raises:
        ValueError: Rates and numbers of tokens are both given, an assignment is none, or it is of a
            parameter that has an option of its own; only the interval of a bound is given, or one
            that is below 1; or a name is empty.
    """
    if decoding_every is not None and decoding_tokens is None:
        raise ValueError(
            f"--decoding-tokens must be given with --decoding-every, got {decoding_every} alone"
        )
    for option, value in (
        ("--decoding-tokens", decoding_tokens),
        ("--decoding-every", decoding_every),
    ):
        if value is not None:
            check_count(option, value, minimum=1)
    if rates and tokens:
        raise ValueError("at most one of --rate and --retention-tokens must be given, got both")
    parameters = parse_assignments(assignments or (), "--set")
    for name, option in OWN_OPTIONS.items():
        if name in parameters:
            raise ValueError(f"{name} must be given by {option}, got --set {name}")
    if protect is not None:
        parameters["protect"] = protect
    parts = {"scorer": scorer, "selector": selector, "propagation": propagation}
    return PolicyOptions(
        split_names(names or (), "--policy"),
        tuple(dict.fromkeys(rates or ())),
        tuple(dict.fromkeys(tokens or ())),
        parameters,
        {
            kind: PartOption.parse(text, f"--{kind}")
            for kind, text in parts.items()
            if text is not None
        },
        decoding_tokens,
        decoding_every,
    )


def split_names(names: Iterable[str], option: str) -> tuple[str, ...]:
    """Split names that may be repeated, comma-separated or both.

    Args:
        names: As the command line has them.
        option: Whose they are, for messages.

    Raises:
        ValueError: One is empty.

    Example:
        >>> split_names(["snapkv, fastkv", "h2o"], "--policy")
        ('snapkv', 'fastkv', 'h2o')
    """
    found = []
    for each in names:
        for name in each.split(","):
            if not name.strip():
                raise ValueError(f"{option} must be names with commas between them, got {each!r}")
            found.append(name.strip())
    return tuple(found)
