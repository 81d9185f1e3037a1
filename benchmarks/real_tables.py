"""Write the tables of `benchmarks/results/real.json` into the pages that quote them, and a picture.

A page has a comment such as ``<!-- real: answers smollm2 needles 1000 -->`` and, below the table,
``<!-- end -->``; what is between them is written by ``python -m benchmarks.real_tables``.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.real import VARIANTS
from kvpolicy.evaluation.pictures import new_figure, png
from kvpolicy.evaluation.scoring import FULL
from kvpolicy.registry import registered

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks/results/real.json"
PAGES = (
    ROOT / "README.md",
    ROOT / "docs/results.md",
    ROOT / "docs/memory.md",
    *sorted((ROOT / "docs/methods").glob("*.md")),
)
PICTURE = ROOT / "docs/real.png"
# Of the picture: methods that people know, and the one that stands apart.
SHOWN = ("replaykv", "kvzip", "chunkkv", "snapkv", "fastkv", "keydiff", "streamingllm")
_MARK = re.compile(r"(<!-- real: (\w+) (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
_COLOURS = ("#08519c", "#6a51a3", "#31a354", "#e6550d", "#a63603", "#7f7f7f", "#bdbdbd")


class Rows:
    """The rows of one cell of the results, by policy, budget and kind of question."""

    def __init__(self, cell: Mapping[str, Any]) -> None:
        self.prompts = _ends([row["count"] for row in cell["rows"] if row["kind"] == "all"])
        self.times: dict[str, Any] = cell.get("times", {})
        self._rows = {}
        self.unset: dict[str, dict[str, Any]] = {}  # policies whose rule has no budget
        for row in cell["rows"]:
            name, _, rate = row["policy"].rpartition(" ")
            if row["policy"] == FULL:
                self._rows[FULL, 1.0, row["kind"]] = row
            elif name:
                self._rows[name, float(rate), row["kind"]] = row
            elif row["kind"] == "all":
                self.unset[row["policy"]] = row

    @property
    def kinds(self) -> list[str]:
        """The kinds of questions, or ``all`` where there is one."""
        found = list(dict.fromkeys(kind for _, _, kind in self._rows if kind != "all"))
        return found or ["all"]

    @property
    def rates(self) -> list[float]:
        """The budgets."""
        return sorted({rate for name, rate, _ in self._rows if name != FULL})

    @property
    def names(self) -> list[str]:
        """The policies, those with most right answers at 20% first."""
        names = {name for name, _, _ in self._rows if name != FULL}
        rate = 0.2 if 0.2 in self.rates else self.rates[-1]
        return sorted(names, key=lambda name: (-(self.right(name, rate) or 0.0), name))

    def row(self, name: str, rate: float, kind: str = "all") -> dict[str, Any] | None:
        """Return a row; None if it was not measured."""
        return self._rows.get((name, 1.0 if name == FULL else rate, kind))

    def right(self, name: str, rate: float, kind: str = "all") -> float | None:
        """Return the percentage of right answers."""
        row = self.row(name, rate, kind)
        return None if row is None or row["score"] is None else 100 * row["score"]

    def lost(self, name: str, rate: float, kind: str = "all") -> float | None:
        """Return the nats that a token of the right answer lost against full context."""
        row, full = self.row(name, rate, kind), self.row(FULL, 1.0, kind)
        return None if row is None or full is None else full["log_prob"] - row["log_prob"]


def found_cells(data: Mapping[str, Any], model: str, task: str, tokens: str) -> dict[str, Rows]:
    """Return the cells of a task that are there: ``known`` and ``later``."""
    names = {way: f"{model} {task} {tokens} {way}" for way in ("known", "later")}
    found = {way: data["cells"][name] for way, name in names.items() if name in data["cells"]}
    if not found:
        raise LookupError(f"{model} {task} {tokens} is not among the results")
    return {way: Rows(cell) for way, cell in found.items()}


def answers(data: Mapping[str, Any], model: str, task: str, tokens: str) -> str:
    """Return a table of right answers in percent, by budget, and the time of prefill."""
    ways = found_cells(data, model, task, tokens)
    times = next(iter(ways.values())).times
    header = [
        "policy",
        *(f"{way}, {100 * rate:g}%" for way, it in ways.items() for rate in it.rates),
    ]
    lines = []
    for name in [FULL, *next(iter(ways.values())).names]:
        cells = [_percent(it.right(name, rate)) for it in ways.values() for rate in it.rates]
        if times:
            ratio = times.get(name, {}).get("prefill_cpu")
            cells.append("" if ratio is None else f"{ratio:.2f}")
        lines.append([_shown(name), *cells])
    prompts = ", ".join(f"{it.prompts} ({way})" for way, it in ways.items())
    said = [f"Prompts: {prompts}."]
    for way, it in ways.items():
        own = [
            f"`{name}` {_percent(100 * row['score'])} (keeps {100 * row['held']:.0f}%)"
            for name, row in it.unset.items()
        ]
        said += [f"Without a budget, {way}: {', '.join(own)}."] if own else []
    header += ["prefill time"] if times else []
    return f"{_table(header, lines)}\n\n{' '.join(said)}"


def kinds(data: Mapping[str, Any], model: str, task: str, tokens: str, rate: str) -> str:
    """Return a table of right answers in percent by kind of question, at one budget."""
    ways = found_cells(data, model, task, tokens)
    first = next(iter(ways.values()))
    header = ["policy", *(f"{way}, {kind}" for way, it in ways.items() for kind in it.kinds)]
    lines = []
    for name in [FULL, *first.names]:
        cells = [it.right(name, float(rate), kind) for it in ways.values() for kind in it.kinds]
        lines.append([_shown(name), *map(_percent, cells)])
    return _table(header, lines)


def lost(data: Mapping[str, Any], model: str, tokens: str, rate: str, *tasks: str) -> str:
    """Return a table of the nats that each token of the right answer lost, least lost first."""
    columns = {
        f"{task.replace('_', ' ')}, {way}": it
        for task in tasks
        for way, it in found_cells(data, model, task, tokens).items()
    }
    prompts = ", ".join(dict.fromkeys(it.prompts for it in columns.values()))
    names = dict.fromkeys(name for it in columns.values() for name in it.names)
    found = {name: [it.lost(name, float(rate)) for it in columns.values()] for name in names}
    lines = [
        [_shown(name), *("" if each is None else f"{each:.2f}" for each in found[name])]
        for name in sorted(found, key=lambda name: _mean(found[name]))
    ]
    return f"{_table(['policy', *columns], lines)}\n\nPrompts of each: {prompts}."


def _mean(lost: Sequence[float | None]) -> float:
    """Return the mean of what was measured, 0 if nothing was."""
    return mean([each for each in lost if each is not None] or [0.0])


def method(data: Mapping[str, Any], name: str) -> str:
    """Return a line for a method's page: right answers beside full context's."""
    ways = found_cells(data, "smollm2", "needles", "1000")
    said, kept = [], ", 10% / 20% kept"
    for way, it in ways.items():
        own, rights = it.unset.get(name), [it.right(name, rate) for rate in (0.1, 0.2)]
        if own is not None:
            rights = [100 * own["score"]]
            kept = kept if said else f", {100 * own['held']:.0f}% held"
        said.append(f"{way} {' / '.join(f'{_percent(each)}%' for each in rights)}")
    full = dict.fromkeys(f"{_percent(it.right(FULL, 1.0))}%" for it in ways.values())
    said.append(f"full context {' / '.join(full)}")
    where = "[SmolLM2](../results.md#real-models-real-text)"
    return f"Right answers on {where}{kept}: question {', '.join(said)}."


def kept(data: Mapping[str, Any], model: str, tokens: str, timed: str, *names: str) -> str:
    """Return a table of answers and of probability lost at 10% and 20%, and of prefill.

    The prompts have ``tokens``, and those that were timed ``timed``.
    """
    ways = found_cells(data, model, "needles", tokens)
    times = next(iter(found_cells(data, model, "needles", timed).values())).times
    header = ["policy", *(f"{what}, {way}" for what in ("right %", "nats lost") for way in ways)]
    lines = []
    for name in (FULL, *names):
        cells = [_both(it.right, name, 0) for it in ways.values()]
        cells += [_both(it.lost, name, 2) for it in ways.values()]
        ratio = times.get(name, {}).get("prefill_cpu")
        lines.append([_called(name), *cells, "" if ratio is None else f"{ratio:.2f}"])
    return _table([*header, "prefill"], lines)


def _both(value: Callable[[str, float], float | None], name: str, digits: int) -> str:
    """Return a number at 10% and at 20%, or full context's one."""
    found = [value(name, rate) for rate in ((1.0,) if name == FULL else (0.1, 0.2))]
    # Adding 0 makes a rounded -0.0 the number that one writes.
    return " / ".join("" if it is None else f"{round(it, digits) + 0:.{digits}f}" for it in found)


def _called(name: str) -> str:
    """Return a policy as one writes it in Python."""
    if name == FULL:
        return name
    method, arguments = VARIANTS.get(name, (name, lambda _: {}))
    said = ", ".join(f"{key}={value}" for key, value in arguments(0.2).items())
    return f"`{registered('policy')[method].__name__}({said})`"


TABLES = {each.__name__: each for each in (answers, kinds, lost, method, kept)}


def written(page: str, data: Mapping[str, Any]) -> str:
    """Return a page with its tables as the results have them."""

    def replaced(found: re.Match[str]) -> str:
        try:
            table = TABLES[found[2]](data, *found[3].split())
        except LookupError:
            table = "Not measured yet: `make real` continues where it was stopped."
        return f"{found[1]}\n{table}\n\n{found[4]}"

    return _MARK.sub(replaced, page)


def picture(data: Mapping[str, Any], model: str, task: str, tokens: str) -> bytes:
    """Draw right answers against what is kept, for the question known and asked later."""
    ways = found_cells(data, model, task, tokens)
    figure = new_figure(9.0, 10)
    titles = {"known": "the question is known", "later": "the question comes later"}
    panels = figure.subplots(1, len(ways), sharey=True, squeeze=False)[0]
    for axes, (way, rows) in zip(panels, ways.items(), strict=True):
        for name, colour in zip(SHOWN, _COLOURS, strict=True):
            points = [(100 * rate, rows.right(name, rate)) for rate in rows.rates]
            there = [(rate, right) for rate, right in points if right is not None]
            axes.plot(*zip(*there, strict=True), "o-", color=colour, label=name, linewidth=1.8)
        shown = (rows.row(name, rate) for name in SHOWN for rate in rows.rates)
        prompts = _ends([row["count"] for row in shown if row is not None])
        full = rows.right(FULL, 1.0)
        axes.axhline(full, color="black", linestyle=":", linewidth=1, label="full context")
        axes.set_xscale("log")
        ticks = [100 * rate for rate in rows.rates]
        axes.set_xticks(ticks, [f"{each:g}" for each in ticks])
        axes.minorticks_off()
        axes.set_title(f"{titles[way]} ({prompts} prompts)", fontsize=10)
        axes.set_xlabel("% of keys and values kept")
        axes.set_ylim(-3, 103)
        axes.grid(color="#eeeeee")
    panels[0].set_ylabel("right answers, %")
    panels[-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return png(figure)


def _ends(counts: Sequence[int]) -> str:
    return " to ".join(map(str, dict.fromkeys((min(counts), max(counts)))))


def _shown(name: str) -> str:
    return name if name == FULL else f"`{name}`"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(
        f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *lines)
    )


def main() -> None:
    """Write the tables and the picture."""
    data = json.loads(RESULT.read_text())
    for page in PAGES:
        page.write_text(written(page.read_text(encoding="utf-8"), data), encoding="utf-8")
    PICTURE.write_bytes(picture(data, "smollm2", "needles", "1000"))


if __name__ == "__main__":
    main()
