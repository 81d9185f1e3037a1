"""Draw pictures of the benchmarks' results from their JSON files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvpolicy.evaluation.comparison.times import Ratio
from kvpolicy.evaluation.extras import MissingExtraError, require
from kvpolicy.evaluation.pictures import Cell, Colour, draw_grid, new_figure, png
from kvpolicy.evaluation.results import write_all

_MARKERS = "osD^vP*X"
_PHASES = {"prefill": "prefill", "decode": "decoding"}
# Width in inches of a policy's name, and of a length's column.
_NAME, _COLUMN = 1.5, 1.05


def draw(folder: Path, name: str, picture: Callable[[], bytes]) -> None:
    """Draw a picture and write it to a folder; without matplotlib, print a note instead."""
    try:
        write_all(folder, {name: picture()})
    except MissingExtraError as error:
        print(f"no picture: {error}")


def gpu_picture(record: dict[str, Any]) -> bytes:
    """Draw speed-ups of prefill and decoding by context length, with their theoretical limits."""
    measured = (cell for cell in record["cells"] if cell["status"] == "measured")
    rows = [cell for cell in measured if cell["prefill_speedup"] is not None]
    where = record["machine"].get("gpu") or record["machine"]["processor"]
    title = f"{record['settings']['model']['preset']}, random weights, on {where}"
    return _speedups(rows, title, "In brackets: what the count of operations or bytes allows.")


def methods_picture(record: dict[str, Any]) -> bytes:
    base = record["rows"][0]["policy"]
    before = {row["context"]: row for row in record["rows"] if row["policy"] == base}
    rows = []
    for row in record["rows"]:
        if row["policy"] == base:
            continue  # the baseline against itself
        found = dict(row)
        for phase in _PHASES:
            times = zip(row[f"{phase}_ms"], before[row["context"]][f"{phase}_ms"], strict=True)
            speed = Ratio(tuple(theirs / ours for ours, theirs in times))
            found[f"{phase}_speedup"] = row[f"{phase}_speedup"]["median"]
            found[f"{phase}_steady"] = speed.steady
        rows.append(found)
    return _speedups(
        rows,
        f"small random Llama on {record['machine']['processor']}",
        "In brackets: full context's operations (prefill), or bytes read (decoding), over the "
        "method's.\nA speed can exceed this, by what is not counted: kvpolicy runs the last layer "
        "for the last token only, and a layer that drops\ntokens for those that go on; at every "
        "decoded token, Transformers' own cache copies all keys and values.\n"
        "?: rounds disagree, or are fewer than 5.",
    )


def chunks_picture(record: dict[str, Any]) -> bytes:
    """Draw the peak memory of prompts read in chunks by length, on logarithmic axes."""
    points = [
        {"at": row["context"], "policy": row["policy"], "peak": row["peaks"][0]}
        for row in record["prompts"]
        if row["grows"]
    ]
    chunk = max((row["chunk"] or 0 for row in record["prompts"]), default=0)
    require("matplotlib", extra="plot")
    from matplotlib.figure import Figure  # without pyplot: no window, no global state
    from matplotlib.ticker import LogFormatter

    figure = Figure(figsize=(6.5, 4.5), layout="constrained")
    figure.suptitle(f"tiny random Llama: prompts in chunks of {chunk:,} tokens")
    axes = figure.subplots()
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("peak memory of prefill (MiB)")
    for index, name in enumerate(dict.fromkeys(point["policy"] for point in points)):
        peaks = {each["at"]: each["peak"] for each in points if each["policy"] == name}
        known = [(at, peak["growth_bytes"] / 2**20) for at, peak in peaks.items() if peak]
        if any(found for _, found in known):
            marker = _MARKERS[index % len(_MARKERS)]
            axes.plot(*zip(*known, strict=True), marker=marker, markersize=5, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(LogFormatter())
    axes.yaxis.set_minor_formatter(LogFormatter())
    ticks = sorted({point["at"] for point in points})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize="small")
    axes.grid(alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return png(figure)


def _speedups(rows: list[dict[str, Any]], title: str, legend: str) -> bytes:
    contexts = sorted({row["context"] for row in rows})

    def rank(name: str) -> float:
        found = [row for row in rows if row["policy"] == name and row["prefill_speedup"]]
        last = max(found, key=lambda row: float(row["context"]), default={"prefill_speedup": 0.0})
        return -last["prefill_speedup"]

    names = sorted(dict.fromkeys(row["policy"] for row in rows), key=rank) or ["no ratio"]
    figure = new_figure(_NAME + _COLUMN * len(_PHASES) * max(len(contexts), 2), len(names))
    figure.suptitle(f"times as fast as full context: {title}", fontsize=10)
    panels = figure.subplots(1, len(_PHASES), sharey=True)

    columns = [f"{context:,}" for context in contexts] or [""]
    for axes, (phase, words) in zip(panels, _PHASES.items(), strict=True):
        speedup = f"{phase}_speedup"
        cells = {
            name: [
                Cell(contexts.index(row["context"]), _speed_text(row, phase), row[speedup])
                for row in rows
                if row["policy"] == name and row[speedup]
            ]
            for name in names
        }
        draw_grid(axes, f"{words} by tokens of the prompt", columns, cells, _speed_colour())
    figure.supxlabel(legend, fontsize=8)
    return png(figure)


def _speed_text(row: dict[str, Any], phase: str) -> str:
    mark = "" if row.get(f"{phase}_steady", True) else "?"
    return f"{row[f'{phase}_speedup']:.2f}{mark} ({row[f'{phase}_allowed']:.2f})"


def _speed_colour() -> Callable[[float], Colour]:
    """Return a colour map for speeds: white at the baseline's, green faster, purple slower.

    Twice as fast is as far from white as half as fast; what is beyond four times looks the same.
    """
    from math import log2

    from matplotlib import colormaps

    found = colormaps["PRGn"]
    return lambda value: found(0.5 + 0.2 * max(-2.0, min(2.0, log2(value))))
