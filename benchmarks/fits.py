"""Fit exponents of growth: the slopes of straight lines through points on log-log axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean

from benchmarks.harness import Row, middle, pivot

# The quantities that are fitted, with functions that read them from a row; None if not measured.
QUANTITIES: dict[str, Callable[[Row], float | None]] = {
    "prefill time": middle("prefill_ms"),
    "prefill CPU time": middle("prefill_cpu_ms"),
    "prefill operations": lambda row: float(row["prefill_flops"]),
    "time of a token": middle("decode_ms"),
    "bytes held": lambda row: float(row["held_bytes"]),
    "peak memory": lambda row: row["peak"] and float(row["peak"]["growth_bytes"]),
}


def exponent(at: Sequence[float], values: Sequence[float]) -> float | None:
    """Return the least-squares slope of logarithms; None with fewer than two points.

    A slope of 1 is proportional growth, 2 quadratic, 0 constant.

    Args:
        at: Places on an axis, above 0.
        values: What was measured there, above 0.

    Example:
        >>> round(exponent([2, 4, 8], [12, 48, 192]), 6)
        2.0
    """
    if len(set(at)) < 2:
        return None
    xs, ys = [math.log(each) for each in at], [math.log(each) for each in values]
    x_mean, y_mean = fmean(xs), fmean(ys)
    over = math.fsum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True))
    return over / math.fsum((x - x_mean) ** 2 for x in xs)


def fits_of(rows: Sequence[Row]) -> list[Row]:
    """Return a row with an exponent for every axis, method and quantity that has two points."""
    found = []
    for axis, policy in dict.fromkeys((row["axis"], row["policy"]) for row in rows):
        along = [row for row in rows if (row["axis"], row["policy"]) == (axis, policy)]
        for quantity, read in QUANTITIES.items():
            known = [(row["at"], value) for row in along if (value := read(row))]
            slope = exponent([at for at, _ in known], [value for _, value in known])
            if slope is not None:
                fit = {"axis": axis, "policy": policy, "quantity": quantity}
                found.append({**fit, "exponent": slope, "points": len(known)})
    return found


def table(fits: Sequence[Row]) -> str:
    """Return a table of exponents: a line per quantity and method, a column per axis."""
    ordered = sorted(fits, key=lambda fit: list(QUANTITIES).index(fit["quantity"]))
    heads = {"quantity": ("exponent of", 20), "policy": ("method", 16)}
    return pivot(ordered, heads, "axis", lambda fit: fit["exponent"], 10, ".2f")
