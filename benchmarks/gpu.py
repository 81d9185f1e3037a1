"""Measure prefill and decoding of long prompts on one GPU by method, with all kinds of buffers.

The model has Llama-3.1-8B's shape and random weights, and is made on the device. ``cells`` are
prompts with an answer in a hand-written loop; ``answers`` those of `generate` with growing and with
fixed buffers, of one row and of 8; ``compiled`` those that `generate` compiles; ``packed`` are
AdaKV's unequal heads; ``tests`` is tests/integrations/gpu. The most important come first. Writes
``gpu.json`` after every cell, and a picture.

A second start with the same --out goes on after the last cell. A cell that was cut short is tried
again once. So the work may be done in several calls of a few minutes.

On a Hopper GPU torch prefers cuDNN's attention, which makes a plan for every new length. This takes
tens of milliseconds for each decoded token, and for each layer if layers hold different numbers of
tokens. So it is disabled unless ``--cudnn`` is given.

    python benchmarks/gpu.py [--minutes 25] [--contexts 2048,8192,32768,131072] [--out DIR]
    python benchmarks/gpu.py --parts cells,answers     # without the other parts
    python benchmarks/gpu.py --cudnn                   # with cuDNN's attention
    python benchmarks/gpu.py --again                   # anew, in place of a result that is there
    python benchmarks/gpu.py --quick                   # a tiny model on the CPU
    python benchmarks/gpu.py --show FILE               # table and picture of a result
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.clocks import Deadline
from benchmarks.common import TINY, ModelSpec, as_json, read_json
from benchmarks.compiled import FIXED, GROWING, compile_config
from benchmarks.gpu_answers import TESTS, AnswerBench, AnswerCell, ExtraCell
from benchmarks.gpu_bench import Bench
from benchmarks.gpu_cells import FAILED, FULL, SKIPPED, Cell, Plan, Settings
from benchmarks.gpu_compiled import CompiledBench, CompiledCell
from benchmarks.gpu_tables import (
    ANSWER_CELLS,
    CELLS,
    COMPILED_CELLS,
    NOTES,
    PACKED_CELLS,
    TEST_CELLS,
)
from benchmarks.harness import Benchmark, Option, Row, Run, Text, at_least
from benchmarks.pictures import gpu_picture
from kvpolicy import DecodingEviction
from kvpolicy.policies import (
    CLAA,
    H2O,
    AdaKV,
    FastKV,
    FullContext,
    GemFilter,
    GQAGroupSelector,
    PyramidInfer,
    SnapKV,
    SpireKV,
    StreamingLLM,
    WindowMaxPoolScorer,
)

LLAMA = ModelSpec(
    hidden_size=4096,
    num_layers=32,
    query_heads=32,
    kv_heads=8,
    intermediate_size=14336,
    vocab_size=128256,
    rope={
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
)
PRESETS = {"llama-3.1-8b": (LLAMA, torch.bfloat16), "tiny": (TINY, torch.float32)}

# Methods whose prompts, answers and compiled answers are measured.
MAIN = (FULL, "everything", "fastkv", "snapkv", "gemfilter", "spirekv", "claa", "adakv")
# Of these, those whose answers are measured wherever prompts take long.
FEW = (FULL, "fastkv", "snapkv")
BOUNDED = ("snapkv_fixed", "snapkv_bounded")
CHUNKED = ("fastkv_chunks", "snapkv_chunks", "full_chunks")
# At the end, if time is left.
LAST = ("streamingllm", "pyramidinfer", "h2o")
ROWS = 8
PACKED_RATES = (0.02, 0.1)
# Starts of a cell, before it is recorded as failed.
TRIES = 2
KINDS: dict[str, Callable[..., Any]] = {
    "cells": Cell,
    "answers": AnswerCell,
    "compiled": CompiledCell,
    "packed": ExtraCell,
    "tests": ExtraCell,
}
PARTS = tuple(KINDS)


OPTIONS = (
    Option("preset", "llama-3.1-8b", quick="tiny", how={"choices": tuple(PRESETS)}),
    Option("device", "cuda", quick="cpu"),
    Option("contexts", [2048, 8192, 32768, 131072], quick=[256, 512]),
    Option("new-tokens", 33, at_least(2), quick=4, help="generated"),
    Option("repeats", 3, help="prefills at most"),
    Option("minutes", 25.0, float, help="for everything"),
    Option("policies", help="with commas between; default all"),
    Option("parts", ",".join(PARTS)),
    Option("cudnn", False, help="with cuDNN's attention, where torch takes it"),
    Option("again", False, help="measure anew, in place of a result that is there"),
)


@attrs.frozen
class Job:
    """A cell that is to be measured.

    Args:
        part: The part of the record that it belongs to.
        policy: Name of the policy, or of what is run.
        context: Tokens of the prompt; 0 without one.
        buffers: Of an answer.
        batch: Rows of an answer.
    """

    part: str
    policy: str
    context: int
    buffers: str = ""
    batch: int = 1

    def __str__(self) -> str:
        """Return the job's name in a record."""
        return "/".join(str(each) for each in attrs.astuple(self) if each not in ("", 0))

    @property
    def place(self) -> tuple[Any, ...]:
        """Return what a cell of the job's part begins with."""
        answer = (self.buffers, self.batch) if self.part == "answers" else ()
        return self.policy, self.context, *answer

    def is_of(self, row: Row) -> bool:
        """True if a row of the job's part is the job's result."""
        keys = ("policy", "context", "buffers", "batch")[: len(self.place)]
        return tuple(row[key] for key in keys) == self.place


def jobs_of(contexts: Sequence[int]) -> list[Job]:
    """Return all cells, the most important first.

    Answers, and compiled answers, are mostly at the longest context but one. Chunks are read at the
    longest, and at four times as many tokens.
    """
    *shorter, longest = contexts
    middle = shorter[-1] if shorter else longest

    def cells(names: Sequence[str], *lengths: int) -> list[Job]:
        return [Job("cells", name, length) for length in lengths for name in names]

    def answers(names: Sequence[str], *lengths: int, batch: int = 1) -> list[Job]:
        return [
            Job("answers", name, length, buffers, batch)
            for length in lengths
            for buffers in ((GROWING, FIXED) if batch == 1 else (GROWING,))
            for name in names
        ]

    def compiled(names: Sequence[str], *lengths: int) -> list[Job]:
        return [Job("compiled", name, length) for length in lengths for name in names]

    found = [
        *cells(MAIN, *shorter),
        *answers(MAIN, *shorter),
        *cells(MAIN, longest),
        *answers((*FEW, "adakv"), middle, batch=ROWS),
        *answers((FULL, *BOUNDED), middle),
        *compiled((FULL, "fastkv", *BOUNDED), middle),
        *(Job("packed", f"adakv {rate}", middle) for rate in PACKED_RATES),
        Job("tests", TESTS, 0),
        *cells(CHUNKED, longest),
        *cells(CHUNKED[:1], 4 * longest),
        *answers(FEW, longest),
        *compiled(MAIN, middle),
        *compiled((FULL, "fastkv"), *shorter, longest),
        *cells(CHUNKED[1:2], 4 * longest),
        *cells(LAST, *contexts),
    ]
    return list(dict.fromkeys(found))


def plans_for(spec: ModelSpec) -> dict[str, Plan]:
    """Return the methods with the paper's settings, for a model of 32 layers.

    ``snapkv_bounded`` chooses again after every 32 decoded tokens. ``snapkv_fixed`` holds the same
    number of entries after the prompt, and lets the answer grow.
    """
    large = spec.num_layers == 32
    chunk, entries = (4096, 1024) if large else (64, 32)
    fastkv, snapkv = FastKV(tsp_rate=0.2, retention_rate=0.1), SnapKV(retention_rate=0.1)
    bound = DecodingEviction(
        WindowMaxPoolScorer(), GQAGroupSelector(retention_tokens=entries), every=32 if large else 2
    )
    return {
        FULL: Plan(None),
        "everything": Plan(FullContext()),
        "fastkv": Plan(fastkv),
        "snapkv": Plan(snapkv),
        "gemfilter": Plan(GemFilter(filter_layer=13 if large else None, retention_rate=0.1)),
        "spirekv": Plan(SpireKV()),
        "claa": Plan(CLAA()),
        "adakv": Plan(AdaKV(retention_rate=0.1)),
        "streamingllm": Plan(StreamingLLM(retention_rate=0.1)),
        "full_chunks": Plan(None, chunk),
        "fastkv_chunks": Plan(fastkv, chunk),
        "snapkv_chunks": Plan(snapkv, chunk),
        "pyramidinfer": Plan(PyramidInfer()),
        "h2o": Plan(H2O(retention_rate=0.1)),
        "snapkv_fixed": Plan(SnapKV(retention_tokens=entries)),
        "snapkv_bounded": Plan(SnapKV(retention_tokens=entries, decoding=bound)),
    }


def sdpa_backend(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> str:
    """Return the attention kernel that torch chooses for a causal prefill at these head sizes."""
    shape = (1, spec.query_heads, 256, spec.hidden_size // spec.query_heads)
    queries = torch.zeros(shape, dtype=dtype, device=device)
    keys = queries[:, : spec.kv_heads]
    try:  # a private function, for a remark only: its failure must not end the benchmark
        chosen = torch._fused_sdp_choice(queries, keys, keys, is_causal=True, enable_gqa=True)
        return str(torch.nn.attention.SDPBackend(chosen).name).lower()
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return "unknown"


def choose(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Find the cells that the command line asks for, and check the other options."""
    jobs = jobs_of(options.contexts)
    known = dict.fromkeys(job.policy for job in jobs if job.part in PARTS[:3])
    chosen = list(known) if options.policies is None else options.policies.split(",")
    parts = options.parts.split(",")
    for name, given, among in (("policies", chosen, known), ("parts", parts, PARTS)):
        if unknown := sorted(set(given) - set(among)):
            parser.error(f"--{name} must be among {', '.join(among)}, got {', '.join(unknown)}")
    if not options.minutes > 0:
        parser.error(f"--minutes must be above 0, got {options.minutes}")
    if options.show is None and options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU that torch can see; try --quick")
    options.jobs = [
        job
        for job in jobs
        if job.part in parts and (options.policies is None or job.policy.split()[0] in chosen)
    ]


class Session:
    """One start of the benchmark, which goes on where an earlier one ended.

    Args:
        run: Holds the record. Its ``unfinished`` has the number of starts of every cell that was
            begun, or skipped, and has no final result.
        bench: Measures.
    """

    def __init__(self, run: Run, bench: Bench) -> None:
        self.run, self.bench, self.answers = run, bench, AnswerBench(bench)
        self.runners: dict[str, Any] = {
            "cells": bench,
            "answers": self.answers,
            "compiled": CompiledBench(bench),
        }
        for part, runner in self.runners.items():
            for row in run.record[part]:
                values = [tuple(v) if isinstance(v, list) else v for v in row.values()]
                runner.cells.append(KINDS[part](*values))

    def perform(self, jobs: Sequence[Job]) -> None:
        """Measure all cells that have no final result; write the record before and after each."""
        record = self.run.record
        unfinished = record["unfinished"]
        for job in jobs:
            starts = unfinished.get(str(job), 0)
            if str(job) not in unfinished and any(map(job.is_of, record[job.part])):
                continue
            unfinished[str(job)] = starts + 1
            self._forget(job)
            self.run.write()
            row = attrs.asdict(self._killed(job) if starts >= TRIES else self._measured(job))
            if row["status"] == SKIPPED:
                unfinished[str(job)] = starts
            elif self.bench.deadline.left() > 0 or starts + 1 >= TRIES:
                del unfinished[str(job)]
            self.run.add(job.part, row)
            if job.policy == FULL:  # a policy may have been measured before
                self._rate()
        record["complete"] = not unfinished and all(
            any(map(job.is_of, record[job.part])) for job in jobs
        )
        self.run.write()

    def _forget(self, job: Job) -> None:
        """Remove what an earlier start has of a cell."""
        record = self.run.record
        record[job.part] = [row for row in record[job.part] if not job.is_of(row)]
        if job.part in self.runners:
            runner = self.runners[job.part]
            runner.cells = [each for each in runner.cells if not job.is_of(attrs.asdict(each))]

    def _rate(self) -> None:
        """Compute all ratios to full context again."""
        for part, runner in self.runners.items():
            runner.cells = [runner.rated(cell) for cell in runner.cells]
            self.run.record[part] = [attrs.asdict(cell) for cell in runner.cells]

    def _killed(self, job: Job) -> Any:
        note = f"the process ended in it {TRIES} times"
        cell = KINDS[job.part](*job.place, FAILED, note)
        if job.part in self.runners:
            self.runners[job.part].cells.append(cell)
        return cell

    def _measured(self, job: Job) -> Any:
        if job.part == "tests":
            return self.answers.tests()
        if job.part == "packed":
            return self.answers.packed(float(job.policy.split()[1]), job.context)
        return self.runners[job.part].run(*job.place)


def resume(run: Run, path: Path) -> None:
    """Take over the results of an earlier start with the same settings.

    Raises:
        ValueError: The file's settings, versions or machine are others.
    """
    earlier, now = read_json(path), json.loads(as_json(run.record))
    for part in ("settings", "versions", "machine"):
        # How long a start may take is no difference.
        was, is_now = ({**each.get(part, {}), "minutes": None} for each in (earlier, now))
        if other := [key for key in is_now if was.get(key) != is_now[key]]:
            raise ValueError(
                f"--out must be a folder without results of other {part}, got {path}, which "
                f"differs in {', '.join(other)}: give another one, or --again to replace it"
            )
    run.record |= {part: earlier[part] for part in ("complete", "unfinished", *PARTS)}


def measure(run: Run) -> None:
    """Measure all cells before the deadline, and write the result after each."""
    options = run.options
    deadline = Deadline(60 * options.minutes, time.monotonic)
    spec, dtype = PRESETS[options.preset]
    model = spec.build(options.device, dtype)
    torch.backends.cuda.enable_cudnn_sdp(options.cudnn)
    settings = Settings(options.new_tokens, options.repeats)
    bench = Bench(model, plans_for(spec), settings, deadline, time.monotonic)
    head = run.begin(settings_of(options, bench), *PARTS, device=model.device)
    run.record = {"benchmark": "gpu", "complete": False, "unfinished": {}, **head}
    if (path := run.folder / f"{run.name}.json").exists() and not options.again:
        resume(run, path)
    Session(run, bench).perform(options.jobs)
    tables = [each.text(run.record) for each in BENCHMARK.tables if each.live]
    print("\n" + "\n".join(filter(None, tables)))


def settings_of(options: argparse.Namespace, bench: Bench) -> dict[str, Any]:
    """Return the settings that a result records."""
    spec, dtype = PRESETS[options.preset]
    model, plans = bench.model, bench.plans
    compiling = compile_config(model.device)
    said = {
        name: "DynamicCache" if plan.policy is None else repr(plan.policy)
        for name, plan in plans.items()
    }
    return {
        **attrs.asdict(bench.settings),
        "minutes": options.minutes,
        "contexts": options.contexts,
        "batch": 1,
        "cudnn": options.cudnn,
        "model": {"preset": options.preset, **attrs.asdict(spec)},
        "dtype": str(dtype),
        "attention": model.config._attn_implementation,
        "sdpa_backend": sdpa_backend(spec, dtype, model.device),
        "policies": said,
        "chunks": {name: plan.chunk for name, plan in plans.items() if plan.chunk is not None},
        "compiled": {
            "policies": {name: said[name] for name in (*MAIN, *BOUNDED)} | {FULL: "StaticCache"},
            "config": "by generate itself" if compiling is None else compiling.to_dict(),
        },
    }


BENCHMARK = Benchmark(
    "gpu",
    __doc__,
    measure,
    OPTIONS,
    (CELLS, ANSWER_CELLS, COMPILED_CELLS, PACKED_CELLS, TEST_CELLS, Text(lambda record: NOTES)),
    picture=gpu_picture,
    settle=choose,
)
main, options_of, table = BENCHMARK.main, BENCHMARK.options_of, BENCHMARK.text

if __name__ == "__main__":
    main()
