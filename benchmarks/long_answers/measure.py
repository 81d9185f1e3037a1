"""Measure how accurate long answers stay under each decoding rule and bound.

The bundled model answers prompts of loops and chains under `generate`. The prompt is read whole;
from then on a rule bounds the entries of every layer, prompt and answer together. The right steps
of every prompt are recorded. ``long_answers.json`` is replaced after every row, and its rows
are not measured again.

    python -m benchmarks.long_answers.measure [--count 48] [--budgets 64,96] [--every 16]
    python -m benchmarks.long_answers.measure --quick
    python -m benchmarks.long_answers.measure --show FILE
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from benchmarks.common import read_json
from benchmarks.decoding import RULES as METHODS
from benchmarks.harness import Benchmark, Column, Option, Row, Run, Table, at_least
from kvpolicy import CachePolicy
from kvpolicy.evaluation.comparison.accuracy import continuations
from kvpolicy.evaluation.tasks.long_answers import KINDS, LongAnswerTask, load_model, right_steps
from kvpolicy.evaluation.tasks.prompts import Prompt
from kvpolicy.policies import FullContext, SnapKV
from kvpolicy.policies.methods.method import Method

FILE = "long_answers.json"
# All methods with their defaults, and SnapKV with a window of a whole loop of 12 steps, with and
# without pooling.
RULES: dict[str, Method] = {
    **{method.__name__: method() for method in METHODS},
    "SnapKV 48": SnapKV(window_size=48),
    "SnapKV 48/1": SnapKV(window_size=48, kernel_size=1),
}
SEED = 11
BATCH = 64
PLACES = ("kind", "rule", "budget", "every")
OPTIONS = (
    Option("count", 48, quick=2, help="prompts of each kind"),
    Option("context", 256, at_least(64), quick=64, help="tokens of a prompt"),
    Option("budgets", [64, 96, 128, 192], quick=[24], help="entries of a layer"),
    Option("every", 16, help="but TOVA's"),
)


def right(model: Any, policy: CachePolicy, asked: LongAnswerTask, count: int) -> list[int]:
    """Count the right steps before the first wrong one, for each of ``count`` prompts."""
    found = []
    drawn = asked.prompts(count, SEED)
    for start in range(0, count, BATCH):
        batch = drawn[start : start + BATCH]
        prompts = [Prompt(each.input_ids, (each.answer,), each.kind) for each in batch]
        for prompt, said in zip(batch, continuations(model, prompts, policy), strict=True):
            found.append(round(right_steps(said, prompt.answer) * asked.steps))
    return found


def share(row: dict[str, Any]) -> tuple[float, float]:
    """Return the mean fraction of right steps, and half its 95% interval."""
    shares = [each / row["steps"] for each in row["right"]]
    half = 1.96 * stdev(shares) / len(shares) ** 0.5 if len(shares) > 1 else 1.0
    return fmean(shares), half


def _share_text(row: Row) -> str:
    mean, half = share(row)
    return f"{mean:.1%} ± {half:.1%}"


def _exact(row: Row) -> float:
    return fmean(each == row["steps"] for each in row["right"])


class WithPages(Table):
    """A table of the rows, followed by the documentation's tables."""

    def text(self, record: dict[str, Any]) -> str:
        """Return all tables as text; see `Table.text`."""
        rows = record[self.part]
        pages = [line for of in tables(rows) for line in ("", *table(rows, *of))]
        return "\n".join([super().text(record), *pages])


TABLE = WithPages(
    "rows",
    Column("kind", -7, "kind"),
    Column("rule", -15, "rule"),
    Column("budget", 7, "budget"),
    Column("every", 6, "every"),
    Column("steps before the first wrong", 30, _share_text),
    Column("exact", 8, _exact, ".0%"),
)


def table(rows: Sequence[dict[str, Any]], kind: str, every: int) -> list[str]:
    """Return a Markdown table of a kind's rows: steps in percent, exact answers in brackets.

    Args:
        rows: The measured rows.
        kind: Kind of the answers.
        every: Tokens between two choices; rules that choose at every token are in every table.
    """
    chosen = [row for row in rows if row["kind"] == kind and row["every"] in (1, every)]
    budgets = list(dict.fromkeys(row["budget"] for row in chosen))
    lines = [
        f"| {kind}, every {every} | {' | '.join(map(str, budgets))} |",
        f"|---|{'---|' * len(budgets)}",
    ]
    for rule in RULES:
        found = {row["budget"]: row for row in chosen if row["rule"] == rule}
        if not found:
            continue
        cells = []
        for row in (found[budget] for budget in budgets):
            cells.append(f"{share(row)[0]:.0%} ({_exact(row):.0%})".replace("%", ""))
        lines.append(f"| `{rule}` | {' | '.join(cells)} |")
    return lines


def tables(rows: Sequence[dict[str, Any]]) -> list[tuple[str, int]]:
    """Return the kinds and intervals that have a table, in order."""
    found = [(row["kind"], row["every"]) for row in rows if row["every"] not in (None, 1)]
    return list(dict.fromkeys(found))


def cases(budgets: Sequence[int], every: int) -> list[tuple[dict[str, Any], CachePolicy]]:
    """Return every rule at every bound, and decoding without a rule, with their row entries."""
    found: list[tuple[dict[str, Any], CachePolicy]] = [
        ({"rule": "none", "budget": None, "every": None}, FullContext())
    ]
    for name, method in RULES.items():
        for budget in budgets:
            rule = method.decoding_rule(budget, min(every, method.every))
            said = {"rule": name, "budget": budget, "every": rule.every}
            found.append((said, FullContext(decoding=rule)))
    return found


def measure(run: Run) -> None:
    """Measure the cases that the file lacks."""
    options, model = run.options, load_model()
    settings = {"context": options.context, "count": options.count, "seed": SEED}
    run.begin(settings, "rows")
    path = run.folder / FILE
    if path.exists() and (before := read_json(path))["settings"] == settings:
        run.record["rows"] = before["rows"]
    done = [{key: row[key] for key in PLACES} for row in run.record["rows"]]
    run.head("rows")
    for kind in KINDS:
        asked = LongAnswerTask(kind, options.context)
        if options.quick:
            asked = LongAnswerTask(kind, options.context, steps=8)
        for said, policy in cases(options.budgets, options.every):
            if {"kind": kind, **said} not in done:
                found = right(model, policy, asked, options.count)
                run.add("rows", {"kind": kind, **said, "steps": asked.steps, "right": found})


BENCHMARK = Benchmark("long_answers", __doc__, measure, OPTIONS, (TABLE,))
main = BENCHMARK.main

if __name__ == "__main__":
    main()
