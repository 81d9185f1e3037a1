"""What the charts share: their frame, axes and marks; every text has the size of the page's."""

from __future__ import annotations

import math
import xml.etree.ElementTree as Tree
from collections.abc import Callable, Sequence

import attrs

from kvpolicy.evaluation.suite.report.markup import node

# A phone's width, less its margins: no chart is ever drawn smaller than it is.
WIDTH = 350
COLOURS, SHAPES = 8, 4


@attrs.frozen
class Axis:
    """Values along a chart's side.

    Args:
        title: What they are, with their unit.
        low: The least value.
        high: The largest.
        ticks: Values that are marked.
        logarithmic: Whether equal factors are equal lengths.
    """

    title: str
    low: float
    high: float
    ticks: tuple[float, ...]
    logarithmic: bool = False

    @classmethod
    def from_zero(cls, title: str, largest: float) -> Axis:
        """From 0 to a round number above ``largest``, in steps that are round too."""
        step = round_step(largest / 4)
        count = max(math.ceil(largest / step - 1e-9), 1)
        return cls(title, 0.0, count * step, tuple(index * step for index in range(count + 1)))

    @classmethod
    def in_factors(cls, title: str, values: Sequence[float], high: float) -> Axis:
        """Logarithmic, from below the least of ``values`` to ``high``."""
        ticks = [digit * 10.0**power for power in range(-4, 9) for digit in (1, 2, 5)]
        low = max([tick for tick in ticks if tick <= min(values) and tick < high], default=ticks[0])
        shown = [tick for tick in ticks if low <= tick <= high]
        return cls(title, low, high, tuple(shown), logarithmic=True)

    def share(self, value: float) -> float:
        """Where a value lies, from 0 at the low end to 1 at the high one."""
        if self.logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def round_step(value: float) -> float:
    """The least of 1, 2, 2.5 and 5 times a power of ten that is not below ``value``.

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


@attrs.frozen
class Frame:
    """The rectangle that values are drawn in, in pixels.

    Args:
        x: The axis below.
        y: The axis at the left.
        left: Of the rectangle.
        top: Of the rectangle.
        width: Of the rectangle.
        height: Of the rectangle.
    """

    x: Axis
    y: Axis
    left: float = 44
    top: float = 10
    width: float = WIDTH - 44 - 16
    height: float = 190

    def place(self, x: float, y: float) -> tuple[float, float]:
        """The pixel of a pair of values."""
        return (
            self.left + self.x.share(x) * self.width,
            self.top + (1 - self.y.share(y)) * self.height,
        )

    def draw(self, tick: Callable[[float], str]) -> list[Tree.Element]:
        """The lines and texts of both axes.

        Args:
            tick: How the values below are written.
        """
        bottom = self.top + self.height
        drawn = []
        for value in self.y.ticks:
            _, y = self.place(self.x.low, value)
            right = self.left + self.width
            drawn += [
                node("line", class_="grid", x1=self.left, x2=right, y1=y, y2=y),
                text(f"{value:g}", self.left - 6, y + 4, anchor="end"),
            ]
        for value in self.x.ticks:
            x, _ = self.place(value, self.y.low)
            drawn += [
                node("line", class_="grid", x1=x, x2=x, y1=bottom, y2=bottom + 4),
                text(tick(value), x, bottom + 17, anchor="middle"),
            ]
        middle = self.top + self.height / 2
        turned = text(self.y.title, 0, 0, anchor="middle")
        turned.set("transform", f"translate(11 {middle:g}) rotate(-90)")
        below = text(self.x.title, self.left + self.width / 2, bottom + 35, anchor="middle")
        return [*drawn, below, turned]


def chart(height: float, label: str, drawn: Sequence[Tree.Element]) -> Tree.Element:
    """A chart of the page's width or less.

    Args:
        height: Pixels.
        label: What it shows, for who cannot see it.
        drawn: What is in it.
    """
    return node(
        "svg",
        *drawn,
        viewBox=f"0 0 {WIDTH} {height:g}",
        width=WIDTH,
        height=height,
        role="img",
        aria_label=label,
    )


def text(
    content: str, x: float, y: float, *, anchor: str = "start", **more: object
) -> Tree.Element:
    """A text in a chart."""
    return node("text", content, x=x, y=y, text_anchor=anchor, **more)


def mark(number: int, x: float, y: float, title: str = "", size: float = 5.0) -> Tree.Element:
    """A series' mark: eight colours and four shapes, so that 32 series differ.

    Args:
        number: Of the series, from 0.
        x: Of its middle.
        y: Of its middle.
        title: What is said of it under the pointer.
        size: Half its width.
    """
    said = [node("title", title)] if title else []
    named = f"mark c{number % COLOURS}"
    shape = (number + number // COLOURS) % SHAPES
    if shape == 0:
        return node("circle", *said, class_=named, cx=x, cy=y, r=size)
    corners = {
        1: ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
        2: ((0.0, -1.2), (1.2, 0.9), (-1.2, 0.9)),
        3: ((0.0, -1.3), (1.3, 0.0), (0.0, 1.3), (-1.3, 0.0)),
    }[shape]
    points = " ".join(f"{x + size * a:.1f},{y + size * b:.1f}" for a, b in corners)
    return node("polygon", *said, class_=named, points=points)
