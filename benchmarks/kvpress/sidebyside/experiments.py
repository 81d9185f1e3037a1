"""Run the experiments of the comparison; each returns rows for the record."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs

from kvpolicy.evaluation.needle import NeedleTask
from sidebyside.processes import Worker
from sidebyside.prompts import random_prompt
from sidebyside.summary import LIBRARIES, agreements, kept_counts, share_right, turns_of

METHODS = ("snapkv", "streamingllm", "h2o", "tova", "keydiff", "pyramidkv")
COMPARED = (
    *METHODS,
    "key_norm",
    "adakv",
    "lagkv",
    "curdkv",
    "chunkkv",
    "expected_attention",
    "leverage",
    "chunk_attention",
    "compactor",
    "criticalkv",
    "critical_ada_kv",
    "kvzip",
)
"""Methods whose kept positions are compared; only the first six are timed and asked questions."""
TIMED = ("full", "full_eager", *METHODS)
SETTINGS = {"rate": 0.1, "window_size": 8, "kernel_size": 7, "num_sinks": 4}
NEEDLE_LEN = 1024
COUNT_LENGTHS = (100, 300, 1000, 1024, 2048, 4096, 8192)
ROW_LENGTHS = (160, 256)
TURN_LENGTHS = (800, 40)
CLOCKS = ("s", "cpu_s")
QUARTER = {**SETTINGS, "rate": 0.25}

Rows = list[dict[str, Any]]


@attrs.frozen
class Bench:
    """The workers of both libraries, and the paths of the models.

    Args:
        workers: The workers by library.
        start: Starts a further worker of a library, whose allocator shows peaks.
        random_model: Folder of the model of random weights.
        needle_model: Folder of the bundled needle model.
    """

    workers: Mapping[str, Worker]
    start: Callable[[str], Worker]
    random_model: Path
    needle_model: Path

    def ask_both(self, do: str, **command: Any) -> Iterator[tuple[str, Any]]:
        """Send the same command to both libraries, and yield their answers."""
        for library in LIBRARIES:
            yield library, self.workers[library].ask(do, **command)


def tell(what: str) -> None:
    """Print a progress message to stderr."""
    print(what, file=sys.stderr, flush=True)


def counts(bench: Bench) -> dict[str, Any]:
    """Return how many tokens each library keeps of prompts of several lengths, at rate 0.1."""
    both = bench.ask_both("count", lengths=COUNT_LENGTHS, rate=SETTINGS["rate"])
    return {"rate": SETTINGS["rate"], "lengths": COUNT_LENGTHS, **dict(both)}


def times(bench: Bench, lengths: Sequence[int], rounds: int, new_tokens: int) -> Rows:
    """Time prefill and decoding in turns, after a warm-up round; then measure peak memory."""
    rows = {
        (length, method, library): {
            "method": method,
            "library": library,
            "context": length,
            **{f"{phase}_{clock}": [] for phase in ("prefill", "decode") for clock in CLOCKS},
        }
        for length in lengths
        for method in TIMED
        for library in LIBRARIES
    }
    for length in lengths:
        prompt = random_prompt(0, length)
        for number in range(rounds + 1):
            for method, library in turns_of(TIMED, number):
                tell(f"{length} tokens, round {number} of {rounds}: {method} by {library}")
                turn = bench.workers[library].ask(
                    "time",
                    model=str(bench.random_model),
                    method=method,
                    settings=SETTINGS,
                    prompt=prompt,
                    new_tokens=new_tokens,
                )
                if number:
                    _add_turn(rows[length, method, library], turn)
    for (length, method, library), row in rows.items():
        tell(f"{length} tokens, memory: {method} by {library}")
        row["peak_bytes"] = [_peak(bench, library, method, length)]
    return list(rows.values())


def _add_turn(row: dict[str, Any], turn: Mapping[str, Any]) -> None:
    for phase in ("prefill", "decode"):
        row[f"{phase}_s"].append(turn[phase]["wall_s"])
        row[f"{phase}_cpu_s"].append(turn[phase]["cpu_s"])
    row["held_bytes"] = turn["held_bytes"]


def _peak(bench: Bench, library: str, method: str, length: int) -> int:
    with bench.start(library) as worker:
        peak: int = worker.ask(
            "memory",
            model=str(bench.random_model),
            method=method,
            settings=SETTINGS,
            prompt=random_prompt(0, length),
        )
    return peak


def kept(bench: Bench, lengths: Sequence[int], needles: int = 4) -> Rows:
    """Compare the positions that both libraries keep, also under kvpress's rules in kvpolicy."""
    needle = [list(each.input_ids) for each in NeedleTask(NEEDLE_LEN).prompts(needles)]
    prompts = [("random", bench.random_model, [random_prompt(1, length)]) for length in lengths]
    rows = []
    for name, model, texts in [*prompts, ("needle", bench.needle_model, needle)]:
        for method in COMPARED:
            tell(f"kept positions, {name} model: {method}")
            command = {"model": str(model), "settings": SETTINGS, "prompts": texts}
            found = dict(bench.ask_both("kept", method=method, **command))
            ruled = bench.workers["kvpolicy"].ask("kept", method=f"{method}:as_kvpress", **command)
            theirs = found["kvpress"]
            rows.append(
                {
                    "model": name,
                    "context": len(texts[0]),
                    "prompts": len(texts),
                    "method": method,
                    **{library: kept_counts(each[0]) for library, each in found.items()},
                    "agreements": _all_agreements(found["kvpolicy"], theirs),
                    "agreements_by_rule": _all_agreements(ruled, theirs),
                }
            )
    return rows


def _all_agreements(ours: Sequence[Any], theirs: Sequence[Any]) -> list[float]:
    return [
        round(agreement, 4)
        for pair in zip(ours, theirs, strict=True)
        for agreement in agreements(*pair)
    ]


def answers(bench: Bench, rates: Sequence[float], questions: int) -> Rows:
    """Return the fraction of exact answers of the needle model, with one hop and with two."""
    tasks = [NeedleTask(NEEDLE_LEN, hops=hops).prompts(questions, seed=1) for hops in (1, 2)]
    rows: Rows = []
    for method, rate in [("full", 1.0), *((each, rate) for rate in rates for each in METHODS)]:
        tell(f"needle questions at rate {rate}: {method}")
        row: dict[str, Any] = {"method": method, "rate": rate, "questions": questions}
        row |= {library: [] for library in LIBRARIES}
        for prompts in tasks:
            for library, generated in bench.ask_both(
                "answers",
                model=str(bench.needle_model),
                method=method,
                settings={**SETTINGS, "rate": rate},
                prompts=[each.input_ids for each in prompts],
                new_tokens=len(prompts[0].answer),
            ):
                row[library].append(share_right(generated, [each.answer for each in prompts]))
        rows.append(row)
    return rows


def batch(bench: Bench) -> Rows:
    """Compare the shorter of two left-padded rows with the same row read alone."""
    rows = [random_prompt(10 + length, length) for length in ROW_LENGTHS]
    found = []
    for method in METHODS:
        tell(f"padded batch: {method}")
        for library, facts in bench.ask_both(
            "batch", model=str(bench.random_model), method=method, settings=QUARTER, rows=rows
        ):
            found.append({"method": method, "library": library, **facts[0]})
    return found


def turns(bench: Bench) -> Rows:
    """Run a second conversation turn, through ``generate`` and through a hand-written loop."""
    first, added = (random_prompt(20 + length, length) for length in TURN_LENGTHS)
    found = []
    for method in ("streamingllm", "snapkv", "pyramidkv"):
        for way in ("generate", "loop"):
            tell(f"second turn by {way}: {method}")
            for library, facts in bench.ask_both(
                "turns",
                model=str(bench.random_model),
                method=method,
                settings=QUARTER,
                first=first,
                added=added,
                way=way,
            ):
                found.append({"method": method, "library": library, "way": way, **facts})
    return found


def open_bench(
    stack: ExitStack, start: Callable[[str, bool], Worker], models: tuple[Path, Path]
) -> Bench:
    """Start a worker of each library, which ends with the exit stack.

    Args:
        stack: The stack that ends the workers.
        start: Starts a worker of a library; its second argument is whether the allocator shows
            peaks.
        models: The random model's folder and the needle model's.
    """
    workers = {library: stack.enter_context(start(library, False)) for library in LIBRARIES}
    return Bench(workers, lambda library: start(library, True), *models)
