"""Define a speed against a baseline, and whether its rounds agree enough to rely on it."""

from __future__ import annotations

from statistics import median

import attrs

from kvpolicy.evaluation.intervals import median_interval

# Of the median: the width of its interval up to which rounds are said to agree.
STEADY = 0.2
_COVERAGE = 0.9
# Of fewer, no two reach that confidence.
MIN_ROUNDS = 5


@attrs.frozen
class Speed:
    """A policy's speed relative to a baseline, round by round.

    Args:
        rounds: The baseline's time over this one's, one entry a round; at least one.

    Example:
        >>> Speed((2.0, 2.1, 1.9, 2.0, 2.05)).text, Speed((14.81,)).text
        ('x2.00', 'x14.81?')
    """

    rounds: tuple[float, ...] = attrs.field(validator=attrs.validators.min_len(1))

    @property
    def median(self) -> float:
        """The median over rounds of the relative speed."""
        return median(self.rounds)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The interval of the median relative speed, of at least 90% confidence.

        Two of the rounds themselves, as many from below as from above: of nine the second and the
        eighth. Times are far from normally distributed, and this asks for no distribution. None
        for fewer than five rounds, of which no two reach the confidence.

        Example:
            >>> Speed((1.0, 9.0, 2.0, 4.0, 3.0)).interval, Speed((1.0, 9.0, 2.0, 4.0)).interval
            ((1.0, 9.0), None)
        """
        return median_interval(self.rounds, _COVERAGE)

    @property
    def steady(self) -> bool:
        """True if the median's interval exists and is at most a fifth of the median wide."""
        if self.interval is None:
            return False
        low, high = self.interval
        return high - low <= STEADY * self.median

    @property
    def text(self) -> str:
        """Return the relative speed as text such as ``"x2.00"``, with a ``?`` if it is unsteady."""
        return f"x{self.median:.2f}{'' if self.steady else '?'}"
