"""Parses policy parts and values of parameters that are written on command lines."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import attrs


@attrs.frozen
class PartOption:
    """A policy part as written on a command line: its registered name and its parameters.

    Args:
        name: The name under which the part is registered.
        parameters: Values by name.
    """

    name: str
    parameters: dict[str, Any] = attrs.field(factory=dict)

    @staticmethod
    def parse(text: str, option: str) -> PartOption:
        """Parse a policy part from the text ``"name"`` or ``"name:parameter=value,..."``."""
        name, colon, rest = text.partition(":")
        assignments = rest.split(",") if colon else []
        return PartOption(name.strip(), parse_assignments(assignments, option))


def parse_assignments(assignments: Iterable[str], option: str) -> dict[str, Any]:
    """Parse texts such as ``"window_size=16"``, given by a named option, into values by name.

    Raises:
        ValueError: A text is not a name and a value.

    Example:
        >>> parse_assignments(["tsp_layer=none", "tsp_rate=0.5", "kernel_size=5"], "--set")
        {'tsp_layer': None, 'tsp_rate': 0.5, 'kernel_size': 5}
    """
    parsed: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = (each.strip() for each in assignment.partition("="))
        value = _value(text)
        if not (name.isidentifier() and equals) or value != value:
            raise ValueError(
                f"{option} must be NAME=VALUE, a finite number, true, false or none, got "
                f"{assignment!r}"
            )
        parsed[name] = value
    return parsed


def _value(text: str) -> Any:
    """Convert a parameter's command-line text to a number, bool or None; NaN if it is none."""
    named = {"none": None, "true": True, "false": False}
    if text.lower() in named:
        return named[text.lower()]
    try:
        value: float = int(text) if text.lstrip("+-").isdecimal() else float(text)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan
