"""Draw an analysis as PNG bytes; matplotlib is imported only when a picture is drawn."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvpolicy.evaluation.analysis.attention import Overlap
from kvpolicy.evaluation.analysis.distances import OutputDistances
from kvpolicy.evaluation.extras import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_WRITTEN = 12  # up to so many layers, the numbers of a heat map fit into its cells
_MAX_ROWS = 16  # legend entries that fit below each other
_COLUMN = 1.5  # inches of each further legend column, for numbers up to a million
_LAYER = "layer (index, from 0)"


def plot_overlap(overlap: Overlap, parts: Mapping[str, range], chance: float) -> bytes:
    """Plot the top-k overlap of every two layers, and its mean against their distance.

    Args:
        overlap: Of the layers' top-k tokens.
        parts: By name, the layers whose pairs are averaged: a line for each.
        chance: The overlap of two layers that choose at random.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    figure = _figure(9.6, 4.2, f"overlap of the layers' top-{overlap.k} tokens by attention")
    pairs, distances = figure.subplots(1, 2, width_ratios=(1, 1.15))
    _heat_map(figure, pairs, overlap)
    for index, (name, layers) in enumerate(parts.items()):
        means = [100 * mean for mean in overlap.by_distance(layers)]
        steps = range(1, len(means))
        colour = "black" if index == 0 else f"C{index - 1}"
        distances.plot(
            steps, means[1:], color=colour, marker="osD"[index % 3], markersize=5, label=name
        )
    distances.axhline(100 * chance, color="grey", linestyle=":", label="chance")
    distances.set_xlabel("layers apart")
    distances.set_ylabel("mean overlap (%)")
    distances.set_ylim(-3, 103)  # so that markers and lines at the ends are not cut off
    _whole_numbers(distances)
    distances.grid(alpha=0.3)
    distances.legend(frameon=False)
    return _png(figure)


def _heat_map(figure: Figure, axes: Axes, overlap: Overlap) -> None:
    count = overlap.num_layers
    # Each layer agrees with itself; these cells stay blank, so that the others stand out.
    cells = [
        [float("nan") if a == b else 100 * value for b, value in enumerate(row)]
        for a, row in enumerate(overlap.pairs)
    ]
    image = axes.imshow(cells, vmin=0, vmax=100, origin="lower", cmap="viridis")
    figure.colorbar(image, ax=axes, label="overlap (%)", shrink=0.85)
    axes.set_xlabel(_LAYER)
    axes.set_ylabel(_LAYER)
    _whole_numbers(axes, both=True)
    if count > _MAX_WRITTEN:
        return
    for a, row in enumerate(cells):
        for b, value in enumerate(row):
            if a != b:
                colour = "white" if value < 60 else "black"
                axes.text(b, a, f"{value:.0f}", ha="center", va="center", color=colour)


def plot_recall(recall: Mapping[int, tuple[float, ...]]) -> bytes:
    """Plot, by layer, the share of attention in the top-k tokens, with a line for each k.

    Args:
        recall: For each k, a fraction for every layer.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    columns = math.ceil(len(recall) / _MAX_ROWS)
    width = 6.4 + _COLUMN * (columns - 1)
    figure = _figure(width, 4.2, "attention held by each layer's top-k tokens")
    from matplotlib import colormaps

    axes = figure.subplots()
    for index, (k, held) in enumerate(sorted(recall.items(), reverse=True)):
        shade = colormaps["viridis"](0.9 * index / max(len(recall) - 1, 1))
        shares = [100 * share for share in held]
        axes.plot(
            range(len(held)), shares, color=shade, marker="o", markersize=5, label=f"k = {k:,}"
        )
    axes.set_xlabel(_LAYER)
    axes.set_ylabel("share of attention (%)")
    axes.set_ylim(-3, 103)
    _whole_numbers(axes)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right center", ncols=columns, frameon=False)
    return _png(figure)


def plot_distances(distances: Mapping[str, OutputDistances]) -> bytes:
    """Plot by layer how far dropping tokens moves the output, with a panel per kind of prompt.

    Lines are means over the prompts; bands reach from the nearest prompt to the farthest.

    Args:
        distances: By kind of prompt.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    rate = next(iter(distances.values())).tsp_rate
    width = 6.4 if len(distances) == 1 else 4.8 * len(distances)
    figure = _figure(
        width, 4.4, f"distance from full context, {100 * rate:g}% of tokens go on after the layer"
    )
    panels = figure.subplots(1, len(distances), sharey=True, squeeze=False)[0]
    for axes, (kind, found) in zip(panels, distances.items(), strict=True):
        _ways(axes, found)
        count = len(found.tokens)
        which = f"{kind}, " if len(distances) > 1 else ""
        what = f"mean and range of {count} prompts" if count > 1 else "1 prompt"
        axes.set_title(which + what, fontsize="medium")
        axes.set_xlabel("layer at which tokens are dropped")
        _whole_numbers(axes)
        axes.grid(alpha=0.3)
    highest = panels[0].get_ylim()[1]
    panels[0].set_ylim(-0.03 * highest, highest)  # so that a marker at 0 is not cut off
    panels[0].set_ylabel("normalised L2 distance")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    return _png(figure)


def _ways(axes: Axes, found: OutputDistances) -> None:
    """Plot the output's change by layer for dropping tokens and for restarting, with bands."""
    ways = (("propagation (FastKV)", found.propagated), ("restart (GemFilter)", found.restarted))
    for index, (label, rows) in enumerate(ways):
        by_layer = list(zip(*rows, strict=True))
        means = [sum(each) / len(each) for each in by_layer]
        nearest, farthest = [min(each) for each in by_layer], [max(each) for each in by_layer]
        axes.fill_between(found.layers, nearest, farthest, color=f"C{index}", alpha=0.18, lw=0)
        axes.plot(
            found.layers, means, color=f"C{index}", marker="os"[index], markersize=5, label=label
        )


def _figure(width: float, height: float, title: str) -> Figure:
    require("matplotlib", extra="plot")
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(title)
    return figure


def _whole_numbers(axes: Any, *, both: bool = False) -> None:
    """Set an axis's ticks at whole numbers only, for layer indices."""
    from matplotlib.ticker import MaxNLocator

    for axis in (axes.xaxis, axes.yaxis)[: 1 + both]:
        axis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))


def _png(figure: Figure) -> bytes:
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    return picture.getvalue()
