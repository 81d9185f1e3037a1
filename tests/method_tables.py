"""The tables of accuracy on the pages of methods, made from the study of benchmarks/results/front.

``python -m tests.method_tables`` writes them into docs/methods again.
"""

import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

from kvpolicy.registry import registered

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "methods"
FRONT = ROOT / "benchmarks" / "results" / "front"
FILES = ("choose_needle_0", "choose_needle_1", "choose_words_0")
# Task, time of the question, and rate, by the head of a column.
COLUMNS = {
    "needles, 2%": ("needle", "with", 0.02),
    "word tasks, 10%": ("words", "with", 0.1),
    "later: needles, 20%": ("needle", "later", 0.2),
    "later: word tasks, 20%": ("words", "later", 0.2),
}
# Methods that take no rate stand in the rows of the lowest rate.
LOWEST = {("needle", "with"): 0.01, ("words", "with"): 0.05, ("needle", "later"): 0.05}
CORNER = "[per cent right](../front.md#the-tables-of-the-method-pages)"
HEAD = re.compile(rf"^\| {re.escape(CORNER)} \|.*\n(?:\|.*\n)+", re.MULTILINE)


def measured() -> dict[str, list[dict[str, Any]]]:
    """The rows of the study by method."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name in FILES:
        record = json.loads((FRONT / f"{name}.json").read_text(encoding="utf-8"))
        for row in record["rows"]:
            found.setdefault(row["name"], []).append({**row, "task": record["task"]})
    return found


def accuracy(rows: list[dict[str, Any]], task: str, mode: str, rate: float) -> str:
    """Per cent right, the mean over kinds of questions and models; "-" if not measured."""
    wanted = [
        fmean(row["scores"].values())
        for row in rows
        if (row["task"], row["mode"], row["rate"]) == (task, mode, rate)
    ]
    return f"{100 * fmean(wanted):.0f}" if wanted else "-"


def table(method: str) -> str:
    """The table of one method beside SnapKV, or FastKV if it drops tokens, and full context."""
    rows = measured()
    drops = any(row["work"] < 0.99 for row in rows[method])
    beside = "fastkv" if drops and method != "fastkv" else "snapkv"
    names = dict.fromkeys((method, beside, "full_context"))
    if not any(row["mode"] == "with" and row["rate"] in (0.02, 0.1) for row in rows[method]):
        return without_rate(rows, method)
    lines = [f"| {CORNER} | {' | '.join(COLUMNS)} |", "|---" * 5 + "|"]
    for name in names:
        cells = []
        for task, mode, rate in COLUMNS.values():
            found = LOWEST.get((task, mode), 0.1) if name == "full_context" else rate
            cells.append(accuracy(rows[name], task, mode, found))
        lines.append(f"| {label(name)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def without_rate(rows: dict[str, list[dict[str, Any]]], method: str) -> str:
    """The table of a method that takes no rate, beside FastKV that keeps 2% and 10%."""
    lines = [
        f"| {CORNER} | tokens held | prefill computed | needles | word tasks |",
        "|---" * 5 + "|",
    ]
    for name, needles, words in ((method, 0.01, 0.05), ("fastkv", 0.02, 0.1)):
        chosen = [r for r in rows[name] if r["mode"] == "with" and r["rate"] in (needles, words)]
        held, work = (percents(chosen, field) for field in ("held", "work"))
        scores = [
            accuracy(rows[name], task, "with", rate)
            for task, rate in (("needle", needles), ("words", words))
        ]
        lines.append(f"| {label(name)} | {held} | {work} | {' | '.join(scores)} |")
    return "\n".join(lines) + "\n"


def percents(rows: list[dict[str, Any]], field: str) -> str:
    """A share by task, written once where it is the same."""
    found = {
        task: fmean(row[field] for row in rows if row["task"] == task)
        for task in ("needle", "words")
    }
    return ", ".join(dict.fromkeys(f"{100 * each:.0f}%" for each in found.values()))


def label(name: str) -> str:
    return f"`{registered('policy')[name].__name__}`" if name != "full_context" else "full context"


def page_of(method: str) -> Path:
    """The page of a method: the one whose example builds it."""
    made = f"PolicyCache({registered('policy')[method].__name__}("
    return next(page for page in sorted(PAGES.glob("*.md")) if made in page.read_text("utf-8"))


if __name__ == "__main__":
    for name in registered("policy"):
        page = page_of(name)
        text = page.read_text(encoding="utf-8")
        if HEAD.search(text):
            page.write_text(HEAD.sub(table(name), text), encoding="utf-8")
