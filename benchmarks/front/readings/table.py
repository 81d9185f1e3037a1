"""Print the tables of the study as Markdown, from the files of `benchmarks.front.readings`.

Run as ``python -m benchmarks.front.readings.table FILE... [--times F.json] [--against kvzip]``.
Files of one task are joined: columns are rates, values means over models, seeds and kinds of
question. The best rule at the rate that most rules have comes first. With ``--against`` every rule
has its paired difference to others, in points, with 95% intervals.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.front.report import Line, difference, lines_of

TITLES = {"needle": "Needles", "words": "Word tasks", "long": "Long answers"}


def table(
    files: Sequence[dict[str, Any]], task: str, costs: dict[str, float], against: Sequence[str]
) -> str:
    """Return the table of one task.

    Args:
        files: The contents of the study's files.
        task: One of `TITLES`.
        costs: The choice's CPU seconds over those of a prefill, by rule.
        against: Rules to which the others' paired differences are shown.
    """
    lines: dict[str, dict[float, Line]] = defaultdict(dict)
    for line in lines_of(files, task, "later"):
        lines[line.name][line.rate] = line
    pairs = {row["name"]: row["products"] for each in files for row in each["rows"]}
    rates = sorted({rate for of in lines.values() for rate in of})
    heads = ["rule", "prefills", "products", "choice"] + [f"{rate:.0%}" for rate in rates]
    rows = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    most = max(rates, key=lambda rate: sum(rate in of for of in lines.values()))
    for name, of in sorted(lines.items(), key=lambda each: -_accuracy(each[1].get(most))):
        cost = f"{costs[name]:.2f}" if name in costs else ""
        products = f"{pairs[name]:.1f}" if pairs[name] is not None else ""
        work = next(iter(of.values())).work
        cells = [_cell(of.get(rate), [lines[each].get(rate) for each in against]) for rate in rates]
        rows.append(f"| {' | '.join([name, f'{work:.2f}', products, cost, *cells])} |")
    return "\n".join(rows).replace("fixed|", "fixed\\|")


def _accuracy(line: Line | None) -> float:
    return -1.0 if line is None else line.accuracy


def _cell(line: Line | None, others: Sequence[Line | None]) -> str:
    """Return the accuracy in per cent, with the differences in points in brackets."""
    if line is None:
        return ""
    said = [f"{100 * line.accuracy:.1f}"]
    for other in others:
        found = other and other is not line and difference(line, other)
        if found:
            said.append(f"{found[0]:+.1f} ± {found[1]:.1f}")
    return said[0] + (f" ({'; '.join(said[1:])})" if said[1:] else "")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables of all files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--times", type=Path)
    parser.add_argument("--against", nargs="*", default=[])
    options = parser.parse_args(arguments)
    files = [json.loads(path.read_text()) for path in options.files]
    costs = {}
    if options.times:
        times = json.loads(options.times.read_text())
        costs = {row["name"]: row["choice_s"] / times["prefill_s"] for row in times["rows"]}
    for task, title in TITLES.items():
        if any(each["task"] == task for each in files):
            print(f"\n### {title}\n\n{table(files, task, costs, options.against)}")


if __name__ == "__main__":
    main()
