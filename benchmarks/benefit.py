"""Draw the README's picture: what a long prompt takes, in full and under FastKV.

The figures of the README are those of this picture: `benefit` reads both off a result of
``gpu.py``. Nothing is measured.

    python benchmarks/benefit.py [benchmarks/results/gpu.json] [--out docs/benefit.png]
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import attrs

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.common import read_json
from benchmarks.pictures import draw
from kvpolicy.evaluation.extras import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks/results/gpu.json"
PICTURE = ROOT / "docs/benefit.png"
CONTEXT = 131072
FULL, POLICY = "full_context", "fastkv"
# Readable on a white page and on a dark one: the picture brings its own white ground.
_GREY, _GREEN, _INK = "#8c959f", "#1a7f37", "#1f2328"


@attrs.frozen
class Benefit:
    """What a prompt takes in full context and under a policy, each as a pair.

    Args:
        device: The GPU that it was measured on.
        seconds: To read the prompt, the medians of the rounds.
        held: Bytes of keys and values after the prompt.
        peak: The most bytes beyond the weights while the prompt is read.
    """

    device: str
    seconds: tuple[float, float]
    held: tuple[float, float]
    peak: tuple[float, float]


def benefit(record: dict[str, Any], context: int = CONTEXT) -> Benefit:
    """Return what a record of ``gpu.py`` says of one length.

    Args:
        record: The result.
        context: Tokens of the prompt, one of the measured lengths.
    """
    measured = {
        cell["policy"]: cell
        for cell in record["cells"]
        if cell["context"] == context and cell["status"] == "measured"
    }
    full, policy = measured[FULL], measured[POLICY]

    def pair(name: str, minus: str | None = None) -> tuple[float, float]:
        first, second = (each[name] - (each[minus] if minus else 0) for each in (full, policy))
        return first, second

    return Benefit(
        record["machine"]["gpu"],
        (median(full["prefill_ms"]) / 1000, median(policy["prefill_ms"]) / 1000),
        pair("held_bytes"),
        pair("prefill_peak_bytes", "before_bytes"),
    )


def figures(found: Benefit) -> str:
    """Return all figures as one line, which the picture's file carries as its description."""
    pairs = (found.seconds, found.held, found.peak)
    return f"{found.device}: " + "; ".join(f"{first:.6g}, {second:.6g}" for first, second in pairs)


def benefit_picture(record: dict[str, Any]) -> bytes:
    """Draw three panels of two bars each, the first full context and the second the policy."""
    found = benefit(record)
    require("matplotlib", extra="plot")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.7), layout="constrained", facecolor="white")
    title = f"Llama-3.1-8B's shape, a prompt of {CONTEXT:,} tokens, one {found.device}"
    figure.suptitle(title, fontsize=13, weight="bold", color=_INK)
    figure.get_layout_engine().set(h_pad=0.12, w_pad=0.08)
    panels = figure.subplots(1, 3)
    gigabytes = (tuple(each / 1e9 for each in pair) for pair in (found.held, found.peak))
    values = (found.seconds, *gigabytes)
    names = ("seconds to read it", "GB of KV cache after it", "GB at peak, beyond weights")
    for axes, name, pair in zip(panels, names, values, strict=True):
        _bars(axes, name, pair)
    panels[0].set_yticks([0, 1], ["full context", "FastKV"], fontsize=12, color=_INK)
    panels[0].tick_params(left=False)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150, metadata={"Description": figures(found)})
    return picture.getvalue()


def _bars(axes: Axes, name: str, values: Sequence[float]) -> None:
    """Draw two horizontal bars with their values, and the ratio behind the second."""
    axes.set_title(name, fontsize=12, color=_INK, loc="left", pad=8)
    axes.barh([0, 1], values, color=[_GREY, _GREEN], height=0.72)
    labels = [f"{values[0]:.1f}", f"{values[1]:.1f}  ({values[0] / values[1]:.2g}x less)"]
    for row, (value, label) in enumerate(zip(values, labels, strict=True)):
        axes.text(value, row, f" {label}", va="center", fontsize=12, color=_INK)
    axes.set_xlim(0, max(values) * 1.32)
    axes.set_ylim(1.5, -0.5)
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.spines["left"].set_visible(True)
    axes.spines["left"].set_color(_GREY)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read a result and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path, nargs="?", default=RESULT)
    parser.add_argument("--out", type=Path, default=PICTURE)
    options = parser.parse_args(arguments)
    record = read_json(options.result)
    draw(options.out.parent, options.out.name, lambda: benefit_picture(record))


if __name__ == "__main__":
    main()
