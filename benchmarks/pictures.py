"""Pictures of the benchmarks' results, from their files alone."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from kvpolicy.evaluation.extras import MissingExtraError, require
from kvpolicy.evaluation.results import write_all

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS = "osD^vP*X"


def draw(folder: Path, name: str, picture: Callable[[], bytes]) -> None:
    """Write a picture to a folder; without matplotlib say so, since the numbers are safe."""
    try:
        write_all(folder, {name: picture()})
    except MissingExtraError as error:
        print(f"no picture: {error}")


def gpu_picture(record: dict[str, Any]) -> bytes:
    """Speed-ups of prefill and decoding by context, each with what the count allows as a line."""
    rows = [
        {
            "policy": cell["policy"],
            "context": cell["context"],
            "prefill": cell["prefill_speedup"],
            "prefill_allowed": cell["prefill_allowed"],
            "decode": cell["decode_speedup"],
            "decode_allowed": cell["decode_allowed"],
        }
        for cell in record["cells"]
        if cell["status"] == "measured" and cell["prefill_speedup"] is not None
    ]
    where = record["machine"].get("gpu") or record["machine"]["processor"]
    return _speedups(rows, f"{record['settings']['model']['preset']}, random weights, on {where}")


def methods_picture(record: dict[str, Any]) -> bytes:
    """As `gpu_picture`, of the methods on the processor."""
    rows = [
        {
            "policy": row["policy"],
            "context": row["context"],
            "prefill": row["prefill_speedup"]["median"],
            "prefill_allowed": row["prefill_allowed"],
            "decode": row["decode_speedup"]["median"],
            "decode_allowed": row["decode_allowed"],
        }
        for row in record["rows"]
    ]
    return _speedups(rows, f"small random Llama on {record['machine']['processor']}")


def scaling_picture(record: dict[str, Any]) -> bytes:
    """Prefill time, and memory where measured, against each axis, on logarithmic axes."""
    names = list(dict.fromkeys(point["axis"] for point in record["points"]))
    rows: dict[str, Callable[[dict[str, Any]], float | None]] = {"prefill (ms)": _prefill_ms}
    if any(point["peak"] for point in record["points"]):
        rows["peak memory of prefill (MiB)"] = _peak_mib
    figure = _figure((12.5, 1.0 + 3.2 * len(rows)), "small random Llama: how time and memory grow")
    grid = figure.subplots(len(rows), len(names), squeeze=False)
    for label, row in zip(rows, grid, strict=True):
        row[0].set_ylabel(label)
        for axis, axes in zip(names, row, strict=True):
            points = [point for point in record["points"] if point["axis"] == axis]
            _growth(axes, points, rows[label])
    for axis, axes in zip(names, grid[-1], strict=True):
        axes.set_xlabel("tokens of the prompt" if axis == "context" else axis)
    return _finish(figure, grid[0][0])


def _prefill_ms(point: dict[str, Any]) -> float:
    return float(median(point["prefill_ms"]))


def _peak_mib(point: dict[str, Any]) -> float | None:
    peak = point["peak"]
    return None if peak is None else peak["growth_bytes"] / 2**20


def _growth(
    axes: Axes,
    points: list[dict[str, Any]],
    value: Callable[[dict[str, Any]], float | None],
) -> None:
    from matplotlib.ticker import LogFormatter

    for index, name in enumerate(dict.fromkeys(point["policy"] for point in points)):
        of_policy = [(each["at"], value(each)) for each in points if each["policy"] == name]
        known = [(at, found) for at, found in of_policy if found]
        if known:
            marker = _MARKERS[index % len(_MARKERS)]
            axes.plot(*zip(*known, strict=True), marker=marker, markersize=5, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(LogFormatter())
    axes.yaxis.set_minor_formatter(LogFormatter())
    ticks = sorted({point["at"] for point in points})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize="small")
    axes.grid(alpha=0.3)


def _speedups(rows: list[dict[str, Any]], title: str) -> bytes:
    figure = _figure((11.0, 7.0), title)
    panels = figure.subplots(2, 1)
    for axes, what in zip(panels, ("prefill", "decode"), strict=True):
        _bars(axes, rows, what)
        axes.set_ylabel(f"{what}: times as fast as\nfull context")
    panels[-1].set_xlabel(
        "tokens of the prompt; black: what the count of operations or bytes allows"
    )
    return _finish(figure, panels[0])


def _bars(axes: Axes, rows: list[dict[str, Any]], what: str) -> None:
    contexts = sorted({row["context"] for row in rows})
    names = list(dict.fromkeys(row["policy"] for row in rows))
    width = 0.8 / max(len(names), 1)
    for index, name in enumerate(names):
        found = [
            (contexts.index(row["context"]) + (index + 0.5) * width - 0.4, row)
            for row in rows
            if row["policy"] == name and row[what] is not None
        ]
        heights = [row[what] for _, row in found]
        look = {"color": f"C{index}", "hatch": "//" if index >= 10 else None, "label": name}
        axes.bar([x for x, _ in found], heights, width * 0.9, **look)
        for x, row in found:
            height = row[f"{what}_allowed"]
            axes.plot([x - width * 0.45, x + width * 0.45], [height, height], color="black")
    axes.axhline(1.0, color="grey", linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(contexts)), [f"{context:,}" for context in contexts])


def _figure(size: tuple[float, float], title: str) -> Figure:
    require("matplotlib", extra="plot")
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title)
    return figure


def _finish(figure: Figure, labelled: Axes) -> bytes:
    handles, labels = labelled.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    return picture.getvalue()
