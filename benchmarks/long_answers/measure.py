"""Which decoding rule holds what of long answers: accuracy by rule and bound.

The bundled model answers prompts of loops and chains under `generate`. The prompt is read whole;
from then on a rule bounds what every layer holds, prompt and answer alike. Every prompt's right
steps are written, ``long_answers.json`` is replaced after every row, and a row that is there is not
measured again.

    python -m benchmarks.long_answers.measure [--count 48] [--budgets 64,96] [--every 16]
    python -m benchmarks.long_answers.measure --quick
    python -m benchmarks.long_answers.measure --show FILE
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from benchmarks.common import (
    at_least,
    facts,
    out_folder,
    parser_of,
    read_json,
    whole_numbers,
    write_json,
)
from benchmarks.decoding import RULES as METHODS
from kvpolicy import CachePolicy
from kvpolicy.evaluation.comparison.accuracy import continuations
from kvpolicy.evaluation.tasks.long_answers import KINDS, LongAnswerTask, load_model, right_steps
from kvpolicy.evaluation.tasks.prompts import Prompt
from kvpolicy.policies import FullContext, Method, SnapKV

FILE = "long_answers.json"
BUDGETS = (64, 96, 128, 192)
# As they are, and SnapKV with a window of a whole loop of 12 steps, also without pooling.
RULES: dict[str, Method] = {
    **{method.__name__: method() for method in METHODS},
    "SnapKV 48": SnapKV(window_size=48),
    "SnapKV 48/1": SnapKV(window_size=48, kernel_size=1),
}
SEED = 11
BATCH = 64
HEADER = (
    f"{'kind':<7}{'rule':<15}{'budget':>7}{'every':>6}{'steps before the first wrong':>30}"
    f"{'exact':>8}"
)


def right(model: Any, policy: CachePolicy, asked: LongAnswerTask, count: int) -> list[int]:
    """The steps before the first wrong one of ``count`` prompts, in their order."""
    found = []
    drawn = asked.prompts(count, SEED)
    for start in range(0, count, BATCH):
        batch = drawn[start : start + BATCH]
        prompts = [Prompt(each.input_ids, (each.answer,), each.kind) for each in batch]
        for prompt, said in zip(batch, continuations(model, prompts, policy), strict=True):
            found.append(round(right_steps(said, prompt.answer) * asked.steps))
    return found


def share(row: dict[str, Any]) -> tuple[float, float]:
    """The mean share of steps before the first wrong one, and half its 95% interval."""
    shares = [each / row["steps"] for each in row["right"]]
    half = 1.96 * stdev(shares) / len(shares) ** 0.5 if len(shares) > 1 else 1.0
    return fmean(shares), half


def line_of(row: dict[str, Any]) -> str:
    """One line of the table."""
    mean, half = share(row)
    exact = fmean(each == row["steps"] for each in row["right"])
    budget = "-" if row["budget"] is None else row["budget"]
    every = "-" if row["every"] is None else row["every"]
    return (
        f"{row['kind']:<7}{row['rule']:<15}{budget:>7}{every:>6}"
        f"{f'{mean:.1%} ± {half:.1%}':>30}{exact:>8.0%}"
    )


def table(rows: Sequence[dict[str, Any]], kind: str, every: int) -> list[str]:
    """A kind's rows as a table of Markdown: steps in percent, and whole answers in brackets.

    Args:
        rows: What was measured.
        kind: Of the answers.
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
            exact = fmean(each == row["steps"] for each in row["right"])
            cells.append(f"{share(row)[0]:.0%} ({exact:.0%})".replace("%", ""))
        lines.append(f"| `{rule}` | {' | '.join(cells)} |")
    return lines


def tables(rows: Sequence[dict[str, Any]]) -> list[tuple[str, int]]:
    """The kinds and intervals that there are tables of, in their order."""
    found = [(row["kind"], row["every"]) for row in rows if row["every"] not in (None, 1)]
    return list(dict.fromkeys(found))


def cases(budgets: Sequence[int], every: int) -> list[tuple[dict[str, Any], CachePolicy]]:
    """Every rule under every bound, and none, with what a row says of it."""
    found: list[tuple[dict[str, Any], CachePolicy]] = [
        ({"rule": "none", "budget": None, "every": None}, FullContext())
    ]
    for name, method in RULES.items():
        for budget in budgets:
            rule = method.decoding_rule(budget, min(every, method.every))
            said = {"rule": name, "budget": budget, "every": rule.every}
            found.append((said, FullContext(decoding=rule)))
    return found


def measure(options: argparse.Namespace, folder: Path) -> None:
    """Measure what is not in the file yet."""
    model = load_model()
    settings = {"context": options.context, "count": options.count, "seed": SEED}
    record: dict[str, Any] = {"benchmark": "long_answers", "settings": settings}
    record |= {**facts(model.device), "rows": []}
    if (folder / FILE).exists():
        before = read_json(folder / FILE)
        if before["settings"] == settings:
            record["rows"] = before["rows"]
    done = [
        {key: row[key] for key in ("kind", "rule", "budget", "every")} for row in record["rows"]
    ]
    print(HEADER, flush=True)
    for kind in KINDS:
        asked = LongAnswerTask(kind, options.context)
        if options.quick:
            asked = LongAnswerTask(kind, options.context, steps=8)
        for said, policy in cases(options.budgets, options.every):
            if {"kind": kind, **said} in done:
                continue
            found = right(model, policy, asked, options.count)
            row = {"kind": kind, **said, "steps": asked.steps, "right": found}
            record["rows"].append(row)
            write_json(folder, FILE, record)
            print(line_of(row), flush=True)


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--count", type=at_least(1), help="prompts of each kind, default 48")
    parser.add_argument("--context", type=at_least(64), help="tokens of a prompt, default 256")
    parser.add_argument(
        "--budgets", type=whole_numbers, help="entries of a layer, default 64 to 192"
    )
    parser.add_argument("--every", type=at_least(1), default=16, help="but TOVA's; default 16")
    options = parser.parse_args(arguments)
    options.count = options.count or (2 if options.quick else 48)
    options.context = options.context or (64 if options.quick else 256)
    options.budgets = options.budgets or ((24,) if options.quick else BUDGETS)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    options = options_of(arguments)
    folder = out_folder(options)
    torch.set_num_threads(options.threads)
    if options.show is None:
        measure(options, folder)
    else:
        rows = read_json(options.show)["rows"]
        print("\n".join([HEADER, *map(line_of, rows)]))
        for kind, every in tables(rows):
            print("\n".join(["", *table(rows, kind, every)]))


if __name__ == "__main__":
    main()
