"""Draw attention, output distances and a calibration as PNG bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from kvpolicy.evaluation.analysis.attention import Overlap
from kvpolicy.evaluation.analysis.distances import OutputDistances
from kvpolicy.evaluation.pictures import png

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_analysis(
    overlap: Overlap,
    chance: float,
    recall: Mapping[int, Sequence[float]],
    distances: OutputDistances,
) -> bytes:
    """Plot FastKV's figures 1a (two panels), 1b and 3; matplotlib must be installed.

    ``chance`` is the overlap of layers that choose at random; ``recall`` by k and layer. Distances
    are means over the prompts, with bands from the nearest prompt to the farthest.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    figure = Figure(figsize=(11, 8.4), layout="constrained")
    (pairs, apart), (held, moved) = figure.subplots(2, 2)
    # Each layer agrees with itself; these cells stay blank, so that the others stand out.
    cells = [
        [float("nan") if a == b else 100 * value for b, value in enumerate(row)]
        for a, row in enumerate(overlap.pairs)
    ]
    what = f"overlap of top-{overlap.k:,} tokens (%)"
    image = pairs.imshow(cells, vmin=0, vmax=100, origin="lower", cmap="viridis")
    figure.colorbar(image, ax=pairs, label=what)
    _label(pairs, "layer")
    at = overlap.layers
    places = range(0, len(at), max(1, len(at) // 8))
    pairs.set_xticks(places, [str(at[place]) for place in places])
    pairs.set_yticks(places, [str(at[place]) for place in places])
    for index, (name, means) in enumerate(overlap.by_distance().items()):
        percents = [100 * mean for mean in means[1:]]
        apart.plot(range(1, len(means)), percents, f"C{index}o-", label=name)
    apart.axhline(100 * chance, color="grey", linestyle=":", label="chance")
    _label(apart, f"mean {what}", "layers apart")
    for index, (k, shares) in enumerate(sorted(recall.items(), reverse=True)):
        shade, percents = colormaps["viridis"](0.2 * index), [100 * share for share in shares]
        held.plot(at, percents, "o-", color=shade, label=f"k = {k:,}")
    _label(held, "share of attention of top-k tokens (%)")
    ways = {"propagation (FastKV)": distances.propagated, "restart": distances.restarted}
    for index, (way, found) in enumerate(ways.items()):
        low, high, colour = [*map(min, found)], [*map(max, found)], f"C{index}"
        moved.fill_between(distances.layers, low, high, alpha=0.2, color=colour)
        moved.plot(distances.layers, [*map(fmean, found)], f"{colour}o-", label=way)
    moved.set_ylim(bottom=0)
    _label(moved, f"output distance, {100 * distances.tsp_rate:g}% of tokens go on")
    return png(figure)


def plot_calibration(
    distances: OutputDistances, layer: int, tolerance: float | None = None
) -> bytes:
    """Plot how far the output moves if tokens are dropped after each layer; mark the chosen one.

    A distance of 0, as after the last layer, has no place on the axis and is left out.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 4.2), layout="constrained")
    axes = figure.subplots()
    for label, field in (("mean", "normalised"), ("worst prompt", "worst")):
        values = [getattr(each, field) or float("nan") for each in distances.by_layer]
        axes.plot(distances.layers, values, "o-", label=label)
    if tolerance is not None:
        axes.axhline(tolerance, color="black", linestyle="--", label="tolerance")
    axes.axvline(layer, color="grey", linestyle=":", label=f"chosen: layer {layer}")
    axes.set_yscale("log" if any(map(max, distances.propagated)) else "linear")
    _label(axes, "squared distance over squared norm", "TSP layer")
    return png(figure)


def _label(axes: Axes, what: str, across: str = "layer") -> None:
    axes.set_xlabel(across)
    axes.set_ylabel(what)
    axes.locator_params(axis="x", integer=True, min_n_ticks=1)
    if what.endswith("(%)"):
        axes.set_ylim(-3, 103)  # so that markers at the ends are not cut off
    if axes.get_legend_handles_labels()[0]:
        axes.grid(alpha=0.3)
        axes.legend()
