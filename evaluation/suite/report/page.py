"""The report as one page that needs nothing else: no other file, no script, no network."""

from __future__ import annotations

import json
import xml.etree.ElementTree as Tree
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvpolicy.evaluation.suite.folder import Description, Results
from kvpolicy.evaluation.suite.report import plots
from kvpolicy.evaluation.suite.report.markup import node, written
from kvpolicy.evaluation.suite.report.tables import overview, task_table
from kvpolicy.evaluation.suite.summary import Summary

STYLE = Path(__file__).with_name("style.css")
INTERVALS = (
    "Differences are to full context on the same prompts, in percentage points, with a 95% "
    "interval of paired samples: the normal one with two more pairs, one won and one lost "
    "outright, so that few samples never look sure. ▼ and ▲ mark methods whose interval leaves out "
    "0. Nothing is corrected for looking at many cells: of a hundred alike five are marked by "
    "chance."
)
OPEN_PARTS = 4
COSTS = (
    "Tokens and bytes are means over the samples, after prefill; times are medians, as they came "
    "while answering, not in turns: for speed see kvpolicy compare."
)


def page(results: Results) -> str:
    """The page of a folder of results, as HTML."""
    summary = Summary.of(results)
    description = results.description
    title = f"{description.settings.get('model', 'model')}: policies side by side"
    body = [
        node("header", node("h1", title), *_headline(results)),
        _open_cells(summary),
        node("section", node("h2", "Scores"), node("p", INTERVALS), _overviews(summary)),
        _charts("Score against memory", plots.memory_charts(summary), plots.legend(summary)),
        _charts("Score against prefill time", plots.prefill_charts(summary), plots.legend(summary)),
        _needles(summary),
        _charts("Time of a sample: prefill, and what follows", plots.latency_charts(summary)),
        node("section", node("h2", "Every task"), node("p", COSTS), *_tasks(summary)),
        node("section", node("h2", "What was run"), *_facts(description)),
    ]
    head = node(
        "head",
        node("meta", charset="utf-8"),
        node("meta", name="viewport", content="width=device-width, initial-scale=1"),
        node("title", title),
        node("style", STYLE.read_text(encoding="utf-8")),
    )
    main = node("main", *(each for each in body if each is not None))
    return "<!DOCTYPE html>\n" + written(node("html", head, node("body", main), lang="en")) + "\n"


def _headline(results: Results) -> list[Tree.Element]:
    summary_of = results.description
    machine = summary_of.environment.get("machine", {})
    tasks = {cell.task for cell in summary_of.expected}
    where = machine.get("gpu", machine.get("processor", "unknown machine"))
    return [
        node(
            "p",
            f"{len(results.samples):,} samples of {len(tasks)} task{'s' * (len(tasks) > 1)} under "
            f"{len(summary_of.methods)} methods, on {where}.",
        )
    ]


def _open_cells(summary: Summary) -> Tree.Element | None:
    count = sum(not figure.finished for figure in summary.figures.values())
    if not count:
        return None
    return node(
        "p",
        f"Not finished: {count} of {len(summary.figures)} cells. They are marked and have no "
        "numbers, nor has any mean they belong to; the same kvpolicy eval goes on with them.",
        class_="open notice",
    )


def _overviews(summary: Summary) -> Tree.Element:
    tables = (overview(summary, length, question) for length, question in summary.places)
    return node("div", *tables, class_="tables")


def _tasks(summary: Summary) -> list[Tree.Element]:
    return _folded({task: task_table(summary, task) for task in summary.tasks})


def _charts(name: str, drawn: Sequence[Tree.Element], *above: Tree.Element) -> Tree.Element:
    return node("section", node("h2", name), *above, node("div", *drawn, class_="charts"))


def _needles(summary: Summary) -> Tree.Element | None:
    maps = plots.needle_maps(summary)
    if not maps:
        return None
    grids = {title: node("div", *drawn, class_="charts") for title, drawn in maps.items()}
    return node("section", node("h2", "Needles by length and depth"), *_folded(grids))


def _folded(parts: Mapping[str, Tree.Element]) -> list[Tree.Element]:
    """Parts under their names, folded up where there are many."""
    opened = "" if len(parts) <= OPEN_PARTS else None
    return [
        node("details", node("summary", name), part, open=opened) for name, part in parts.items()
    ]


def _facts(description: Description) -> list[Tree.Element]:
    """Settings, versions, machine and methods, as lists of names and values."""
    methods = {label: method.parameters for label, method in description.methods.items()}
    found = {"settings": description.settings, **description.environment, "methods": methods}
    return [_facts_list(name, values) for name, values in found.items()]


def _facts_list(name: str, values: Mapping[str, Any]) -> Tree.Element:
    entries: list[Tree.Element] = []
    for key, value in values.items():
        text = value if isinstance(value, str) else json.dumps(value)
        entries += [node("dt", key), node("dd", text)]
    return node("details", node("summary", name), node("dl", *entries))
