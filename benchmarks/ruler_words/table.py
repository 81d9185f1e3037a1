"""Print the table of ``benchmarks/results/ruler_words.json`` for the documentation.

Run as ``python -m benchmarks.ruler_words.table``.
"""

from __future__ import annotations

import json
from statistics import fmean
from typing import Any

from benchmarks.answers import MODES
from benchmarks.ruler_words.measure import RATES, RESULTS


def cells(rows: list[dict[str, Any]], mode: str) -> list[str]:
    """Return a table cell per rate: the mean score over the kinds, then each kind, in percent."""
    said = []
    for rate in RATES:
        found = [row for row in rows if row["retention_rate"] in (rate, None)]
        if not found:
            said.append("")
            continue
        scores = [round(100 * value) for value in found[0]["scores"][mode].values()]
        said.append(f"**{fmean(scores):.0f}** · {' '.join(map(str, scores))}")
    return said


def main() -> None:
    """Print one table per mode, with the best mean first."""
    rows = json.loads(RESULTS.read_text())["rows"]
    rows = [row for row in rows if set(row["scores"]) == set(MODES)]
    for mode in MODES:
        by_name: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            by_name.setdefault(row["policy"], []).append(row)
        print(f"\n{mode}: {', '.join(rows[0]['scores'][mode])}\n")
        print("| method | " + " | ".join(f"keeps {rate:.0%}" for rate in RATES) + " |")
        print("|---|" + "---|" * len(RATES))
        means = {
            name: fmean(value for row in found for value in row["scores"][mode].values())
            for name, found in by_name.items()
        }
        for name in sorted(means, key=means.__getitem__, reverse=True):
            print(f"| {name} | " + " | ".join(cells(by_name[name], mode)) + " |")


if __name__ == "__main__":
    main()
