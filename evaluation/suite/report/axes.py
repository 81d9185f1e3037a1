"""The axes of charts: their ends and their marked values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs


@attrs.frozen
class Axis:
    """A chart's axis: its title and the values marked on it.

    Args:
        title: What the values are, with their unit.
        ticks: Values that are marked, ascending, at least two.
        logarithmic: Whether equal factors are equal lengths.
    """

    title: str
    ticks: tuple[float, ...]
    logarithmic: bool = False

    @classmethod
    def from_zero(cls, title: str, largest: float) -> Axis:
        """Make a linear axis from 0 to a round number not below ``largest``."""
        step = round_step(largest / 4)
        count = max(math.ceil(largest / step - 1e-9), 1)
        return cls(title, tuple(index * step for index in range(count + 1)))

    @classmethod
    def in_factors(cls, title: str, values: Sequence[float], high: float) -> Axis:
        """Make a logarithmic axis from below the smallest of ``values`` up to ``high``."""
        ticks = [digit * 10.0**power for power in range(-4, 9) for digit in (1, 2, 5)]
        low = max([tick for tick in ticks if tick <= min(values) and tick < high], default=ticks[0])
        return cls(title, tuple(tick for tick in ticks if low <= tick <= high), logarithmic=True)

    def share(self, value: float) -> float:
        """Return a value's place on the axis, from 0 at the low end to 1 at the high end."""
        low, high = self.ticks[0], self.ticks[-1]
        if self.logarithmic:
            return math.log(value / low) / math.log(high / low)
        return (value - low) / (high - low)


def round_step(value: float) -> float:
    """Return the smallest of 1, 2, 2.5 and 5 times a power of ten not below ``value``.

    Example:
        >>> round_step(25.0), round_step(0.021), round_step(60.0)
        (25.0, 0.025, 100.0)
    """
    power = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next(
        round(digit * power, 12)
        for digit in (1, 2, 2.5, 5, 10)
        if digit * power >= value * 0.999999
    )
