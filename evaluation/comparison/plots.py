"""Draw sweeps and calibration as PNG bytes; matplotlib is imported only when drawing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvpolicy.evaluation.calibration.distances import Calibration
from kvpolicy.evaluation.comparison.sweep import Sweep
from kvpolicy.evaluation.extras import require
from kvpolicy.evaluation.pictures import png

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = "osD^vP*X"


def plot_sweep(sweep: Sweep) -> bytes:
    """Plot FastKV's accuracy against the layer after which it drops tokens, per kind of prompt.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    figure, panels = _panels(list(sweep.full), "FastKV: exact match by TSP layer")
    for kind, axes in panels.items():
        _full_context_line(axes, 100 * sweep.full[kind].rate)
        for index, (rate, layers) in enumerate(sweep.scores.items()):
            points = [(float(i), 100 * scores[kind].rate) for i, scores in enumerate(layers)]
            _line(axes, index, points, f"retention rate {rate:g}")
        axes.set_xlabel("TSP layer (index, from 0)")
        axes.set_xticks(range(len(next(iter(sweep.scores.values())))))
    return _finish(figure, panels)


def plot_calibration(calibration: Calibration) -> bytes:
    """Plot how far the output moves if tokens are dropped after each layer; mark the chosen one.

    A distance of 0, as after the last layer, has no place on the axis and is left out.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    require("matplotlib", extra="plot")
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    layers = calibration.distances.layers
    figure = Figure(figsize=(5.6, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.set_title("final hidden state under TSP against full context")
    for index, (name, label) in enumerate((("normalised", "mean"), ("worst", "worst prompt"))):
        points = [(float(each.tsp_layer), float(getattr(each, name))) for each in layers]
        seen = [point for point in points if point[1] > 0]
        if seen:
            _line(axes, index, seen, label)
    if calibration.criterion == "earliest":
        axes.axhline(calibration.tolerance, color="black", linestyle="--", label="tolerance")
    axes.axvline(
        calibration.layer, color="grey", linestyle=":", label=f"chosen: layer {calibration.layer}"
    )
    axes.set_yscale("log")
    axes.set_xlim(-0.3, layers[-1].tsp_layer + 0.3)
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("TSP layer (index, from 0)")
    axes.set_ylabel("squared L2 distance over squared norm")
    axes.grid(alpha=0.3)
    return _finish(figure, {"": axes})


def _panels(kinds: list[str], title: str) -> tuple[Figure, dict[str, Axes]]:
    require("matplotlib", extra="plot")
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    figure = Figure(figsize=(1.0 + 4.0 * len(kinds), 4.2), layout="constrained")
    figure.suptitle(title)
    grid = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
    panels: dict[str, Any] = dict(zip(kinds, grid, strict=True))
    for kind, axes in panels.items():
        axes.set_title(kind, fontsize="medium")
        axes.set_ylim(-4, 104)
        axes.grid(alpha=0.3)
    grid[0].set_ylabel("exact match (% of prompts)")
    return figure, panels


def _full_context_line(axes: Axes, height: float) -> None:
    axes.axhline(height, color="black", linestyle="--", linewidth=1.2, label="full context")


def _line(axes: Axes, index: int, points: list[tuple[float, float]], label: str) -> None:
    xs, ys = zip(*points, strict=True)
    # Good policies lie on top of each other: hollow markers of different form and size, and
    # thinner lines on top of thicker ones, let all of them be seen.
    level = index % 4
    axes.plot(
        xs,
        ys,
        color=f"C{index}",
        linewidth=3.5 - 0.9 * level,
        marker=_MARKERS[index % len(_MARKERS)],
        markersize=12 - 2.2 * level,
        markerfacecolor="none",
        markeredgewidth=1.8,
        label=label,
    )


def _finish(figure: Figure, panels: dict[str, Axes]) -> bytes:
    handles, labels = next(iter(panels.values())).get_legend_handles_labels()
    columns = 2 if len(panels) == 1 else 4
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    return png(figure)
