"""Draw tables as pictures: coloured cells with numbers, a row for each policy."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from kvpolicy.evaluation.extras import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A colour as matplotlib makes them: red, green, blue, opacity, each in [0, 1].
Colour = tuple[float, float, float, float]
# Inches of a row, and of what is above and below all of them.
ROW, MARGIN = 0.27, 1.2
_TEXT = 9


@attrs.frozen
class Cell:
    """A coloured cell of a grid plot: its column, from 0, its text, and the value of its colour."""

    column: int
    text: str
    value: float


def new_figure(width: float, rows: int) -> Figure:
    """Make a matplotlib figure, tall enough for so many rows, without pyplot; width in inches."""
    require("matplotlib", extra="plot")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, MARGIN + ROW * rows), layout="constrained")


def draw_grid(
    axes: Axes,
    title: str,
    columns: Sequence[str],
    rows: Mapping[str, Sequence[Cell]],
    colour: Callable[[float], Colour],
) -> None:
    """Draw rows of coloured cells by their names, the first at the top; missing cells are empty."""
    from matplotlib.patches import Rectangle

    axes.set_title(title, fontsize=_TEXT + 1, pad=8)
    axes.set_xlim(0, len(columns))
    axes.set_ylim(len(rows), 0)
    axes.xaxis.tick_top()
    axes.set_yticks([index + 0.5 for index in range(len(rows))], [*rows], fontsize=_TEXT)
    axes.set_xticks([index + 0.5 for index in range(len(columns))], columns, fontsize=_TEXT)
    spot = axes.get_subplotspec()
    axes.tick_params(left=False, top=False, labelleft=spot is None or spot.is_first_col())
    axes.spines[:].set_visible(False)
    for index, cells in enumerate(rows.values()):
        for cell in cells:
            look = colour(cell.value)
            place, size = (cell.column + 0.02, index + 0.04), (0.96, 0.92)
            axes.add_patch(Rectangle(place, *size, facecolor=look, linewidth=0))
            style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": _TEXT}
            axes.text(cell.column + 0.5, index + 0.5, cell.text, color=_ink(look), **style)


def accuracy_colour() -> Callable[[float], Colour]:
    """Return a colour map for accuracy in percent, darker for larger values."""
    from matplotlib import colormaps

    found = colormaps["YlGnBu"]
    # The darkest colours are left out, since they are hard to tell apart.
    return lambda value: found(0.04 + 0.7 * value / 100)


def png(figure: Figure) -> bytes:
    """Return a matplotlib figure as the bytes of a PNG file."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    return picture.getvalue()


def _ink(background: Colour) -> str:
    """Return black or white, whichever is readable on a background colour."""
    red, green, blue, _ = background
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"
