"""Parse numbers of bytes on the command line."""

from __future__ import annotations

import math
import re

UNITS: dict[str, int] = {"": 1, "B": 1} | {
    f"{prefix}{binary}B": (1024 if binary else 1000) ** (power + 1)
    for power, prefix in enumerate("kMGT")
    for binary in ("", "i")
}
_BY_LOWER = {unit.lower(): size for unit, size in UNITS.items()}
_SIZE = re.compile(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([a-zA-Z]*)\s*")


def parse_size(text: str, option: str) -> int:
    """Parse a size in bytes such as ``80GB`` (powers of 1,000), ``24GiB`` (1,024) or ``40e9``.

    Args:
        text: The number, with a unit or without, in upper or lower case.
        option: What it is the value of, for messages.

    Raises:
        ValueError: It is no such number, or below 1.

    Example:
        >>> parse_size("80GB", "--memory"), parse_size("1.5 KiB", "--memory")
        (80000000000, 1536)
    """
    found = _SIZE.fullmatch(text)
    unit = _BY_LOWER.get(found[2].lower()) if found else None
    try:
        number = float(found[1]) if found else math.nan
    except ValueError:  # such as a number with two points
        number = math.nan
    if found is None or unit is None or not math.isfinite(number) or number * unit < 1:
        raise ValueError(
            f"{option} must be a number of bytes such as 80GB, 24GiB or 40e9, in "
            f"{', '.join(name for name in UNITS if name)}, got {text!r}"
        )
    return round(number * unit)
