"""Print the tables of the front study, from the files of `benchmarks.front.measure`.

Run as ``python -m benchmarks.front.report FILE...``. Prints, for each kind of model and each time
of the question, the mean over models, seeds and kinds of question, with what it cost; which
policies are on the front (no other answers as much while holding and computing no more); and, where
files have every prompt's score, differences to FastKV at the same rate with 95% intervals of the
paired differences. ``--picture FILE`` draws accuracy against what is held.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import attrs

from benchmarks.front.compositions import FASTKV, FULL

RULE = "|---" * 6 + "|"
# Costs that differ by less than this factor count as equal.
SAME = 1.02


@attrs.frozen
class Line:
    """The results of one policy at one rate, over all models and seeds of a task.

    Args:
        name: Name of the composition.
        rate: Keys and values to keep.
        accuracy: Mean of the kinds' means, from 0 to 1.
        held: Part of a full cache's bytes.
        work: Part of full context's layer-tokens in prefill.
        models: The mean of each model.
        each: Every prompt's score in per cent, by model, seed and kind; empty where unknown.
    """

    name: str
    rate: float
    accuracy: float
    held: float
    work: float
    models: dict[str, float]
    each: dict[tuple[str, int, str], list[int]]

    def beats(self, other: Line) -> bool:
        """True if it is no worse than another line in any measure, and better in at least one."""
        no_worse = (
            self.accuracy >= other.accuracy
            and self.held <= other.held * SAME
            and self.work <= other.work * SAME
        )
        better = (
            self.accuracy > other.accuracy
            or self.held * SAME < other.held
            or self.work * SAME < other.work
        )
        return no_worse and better


def lines_of(files: Sequence[dict[str, Any]], task: str, mode: str) -> list[Line]:
    """Return the lines of all policies for a task, with the question known early or late."""
    rows: dict[tuple[str, float], list[tuple[str, dict[str, Any]]]] = defaultdict(list)
    for data in files:
        if data["task"] == task:
            for row in data["rows"]:
                if row["mode"] == mode:
                    rows[row["name"], row["rate"]].append((data["model"], row))
    lines = []
    for (name, rate), found in rows.items():
        models: dict[str, list[float]] = defaultdict(list)
        each = {}
        for model, row in found:
            models[model].append(fmean(row["scores"].values()))
            for kind, scores in row.get("each", {}).items():
                each[model, row["seed"], kind] = [int(score) for score in scores.split()]
        means = {model: fmean(scores) for model, scores in models.items()}
        lines.append(
            Line(
                name,
                rate,
                fmean(means.values()),
                fmean(row["held"] for _, row in found),
                fmean(row["work"] for _, row in found),
                means,
                each,
            )
        )
    return lines


def front_of(lines: Sequence[Line]) -> list[Line]:
    """Return the lines that no other line beats, sorted by the bytes held."""
    found = [line for line in lines if not any(other.beats(line) for other in lines)]
    return sorted(found, key=lambda line: (line.held, line.work))


def difference(line: Line, other: Line) -> tuple[float, float] | None:
    """Return the mean paired difference in points, and half its 95% interval.

    The same prompt under both policies is a pair; kinds have equal weights.
    """
    shared = sorted(line.each.keys() & other.each.keys())
    if not shared:
        return None
    pairs = [
        [mine - theirs for mine, theirs in zip(line.each[key], other.each[key], strict=True)]
        for key in shared
    ]
    variance = sum(stdev(each) ** 2 / len(each) for each in pairs) / len(pairs) ** 2
    return fmean(fmean(each) for each in pairs), 1.96 * math.sqrt(variance)


def table(lines: Sequence[Line]) -> str:
    """Return a Markdown table of the lines, with the best first within each rate."""
    rows = ["| policy | rate | held | prefill | accuracy | by model |", RULE]
    for line in sorted(lines, key=lambda line: (line.rate, -line.accuracy)):
        models = " ".join(f"{100 * line.models[name]:.0f}" for name in sorted(line.models))
        rows.append(
            f"| {line.name} | {line.rate:g} | {100 * line.held:.1f}% | {line.work:.2f} "
            f"| {100 * line.accuracy:.1f} | {models} |"
        )
    return "\n".join(rows)


def against_fastkv(lines: Sequence[Line]) -> str:
    """Return a Markdown table of each policy's difference to FastKV at the same rate."""
    base = {line.rate: line for line in lines if line.name == FASTKV}
    rows = [
        "| policy | rate | held | prefill | accuracy | against FastKV |",
        "|---|---|---|---|---|---|",
    ]
    for line in sorted(lines, key=lambda line: (line.rate, -line.accuracy)):
        if line.rate not in base or line.name == FULL:
            continue
        found = difference(line, base[line.rate])
        if found is not None:
            rows.append(
                f"| {line.name} | {line.rate:g} | {100 * line.held:.1f}% | {line.work:.2f} "
                f"| {100 * line.accuracy:.1f} | {found[0]:+.1f} ± {found[1]:.1f} |"
            )
    return "\n".join(rows) if len(rows) > 2 else ""


def picture(groups: dict[str, list[Line]], path: Path) -> None:
    """Draw accuracy against bytes held, with a panel for each group."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(groups), 4.4), layout="constrained")
    panels = figure.subplots(1, len(groups), squeeze=False)[0]
    for panel, (title, lines) in zip(panels, groups.items(), strict=True):
        shown = [line for line in lines if line.held <= 0.16]
        points = panel.scatter(
            [100 * line.held for line in shown],
            [100 * line.accuracy for line in shown],
            c=[line.work for line in shown],
            cmap="viridis",
            vmin=0.3,
            vmax=1.0,
            s=18,
        )
        for name, marker in ((FASTKV, "D"), ("snapkv", "s")):
            of_name = sorted((each for each in shown if each.name == name), key=lambda x: x.held)
            panel.plot(
                [100 * each.held for each in of_name],
                [100 * each.accuracy for each in of_name],
                marker=marker,
                linewidth=0.8,
                label={"fastkv": "FastKV", "snapkv": "SnapKV"}[name],
            )
        panel.set_title(title)
        panel.set_xlabel("keys and values held, % of full context")
        panel.set_ylim(0, 102)
        panel.legend(loc="lower right", frameon=False)
    panels[0].set_ylabel("answered, %")
    figure.colorbar(points, ax=list(panels), label="prefill computed, of full context")
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables of all files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--front-only", action="store_true")
    options = parser.parse_args(arguments)
    files = [json.loads(path.read_text()) for path in options.files]
    groups = {}
    for task, title in (("needle", "needles"), ("words", "word tasks")):
        for mode in ("with", "later"):
            lines = lines_of(files, task, mode)
            if not lines:
                continue
            groups[f"{title}, question {'known' if mode == 'with' else 'unknown'}"] = lines
            print(f"\n## {title}, question {mode}\n")
            if not options.front_only:
                print(table(lines))
                print()
            print("On the front:\n")
            print(table(front_of(lines)))
            if differences := against_fastkv(lines):
                print(f"\n{differences}")
    if options.picture is not None:
        picture(groups, options.picture)


if __name__ == "__main__":
    main()
