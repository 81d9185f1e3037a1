"""Measure prefill and decoding of long prompts on one GPU by method, with all kinds of buffers.

The model has Llama-3.1-8B's shape and random weights, and is made on the device. ``cells`` are
prompts with an answer in a hand-written loop; ``answers`` those of `generate` with growing and with
fixed buffers, of one row and of 8; ``compiled`` those that `generate` compiles. The most important
come first. Writes ``gpu.json`` after every cell, and a picture.

A second start with the same --out goes on after the last cell. A cell that was cut short is tried
again once. So the work may be done in several calls of a few minutes.

On a Hopper GPU torch prefers cuDNN's attention, which makes a plan for every new length. This takes
tens of milliseconds for each decoded token, and for each layer if layers hold different numbers of
tokens. So it is disabled unless ``--cudnn`` is given.

    python benchmarks/gpu.py [--minutes 25] [--contexts 2048,8192,32768,131072] [--out DIR]
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.common import TINY, ModelSpec, as_json, read_json
from benchmarks.gpu_cells import FAILED, FULL, MEASURED, Bench, Cell, Job, Plan, Settings, ratios
from benchmarks.harness import Benchmark, Column, Option, Row, Run, Table, middle, names_among
from benchmarks.pictures import gpu_picture
from benchmarks.timing import COMPILED, FIXED, GROWING, Deadline, compile_config
from kvpolicy import DecodingEviction, policies

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
MAIN = (
    *(FULL, "everything", "fastkv", "snapkv"),
    *("replaykv", "replaykv_drops", "gemfilter", "adakv"),
)
# Of these, those whose answers are measured wherever prompts take long.
FEW = (FULL, "fastkv", "snapkv")
BOUNDED = ("snapkv_fixed", "snapkv_bounded")
CHUNKED = ("fastkv_chunks", "snapkv_chunks", "full_chunks")
# At the end, if time is left.
LAST = ("streamingllm", "pyramidinfer", "spirekv", "claa", "h2o")
ROWS = 8
# Starts of a cell, before it is recorded as failed.
TRIES = 2
PARTS = ("cells", "answers", "compiled")


OPTIONS = (
    Option("preset", "llama-3.1-8b", quick="tiny", choices=tuple(PRESETS)),
    Option("device", "cuda", quick="cpu"),
    Option("contexts", [2048, 8192, 32768, 131072], quick=[256, 512]),
    Option("new-tokens", 33, least=2, quick=4, help="generated"),
    Option("repeats", 3, help="prefills at most"),
    Option("minutes", 25.0, help="for everything"),
    Option("policies", help="with commas between; default all"),
    Option("parts", ",".join(PARTS)),
    Option("cudnn", False, help="with cuDNN's attention, where torch takes it"),
    Option("again", False, help="measure anew, in place of a result that is there"),
)


def jobs_of(contexts: Sequence[int]) -> list[Job]:
    """Return all cells, the most important first.

    Answers, and compiled answers, are mostly at the longest context but one. Chunks are read at the
    longest, and at four times as many tokens.
    """
    *shorter, longest = contexts
    middle = shorter[-1] if shorter else longest

    def jobs(
        part: str,
        names: Sequence[str],
        *lengths: int,
        buffers: Sequence[str] = ("",),
        batch: int = 1,
    ) -> list[Job]:
        return [
            Job(part, name, length, held, batch)
            for length in lengths
            for held in buffers
            for name in names
        ]

    cells, both, rows = partial(jobs, "cells"), (GROWING, FIXED), (*FEW, "adakv")
    answers = partial(jobs, "answers", buffers=both)
    compiled = partial(jobs, "compiled", buffers=(COMPILED,))
    found = [
        *cells(MAIN, *shorter),
        *answers(MAIN, *shorter),
        *cells(MAIN, longest),
        *answers(rows, middle, buffers=both[:1], batch=ROWS),
        *answers((FULL, *BOUNDED), middle),
        *compiled((FULL, "fastkv", "snapkv_fixed"), middle),
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
    chunk, entries, filter_layer, every = (4096, 1024, 13, 32) if large else (64, 32, None, 2)
    fastkv = policies.FastKV(tsp_rate=0.2, retention_rate=0.1)
    snapkv = policies.SnapKV(retention_rate=0.1)
    group = policies.GQAGroupSelector(retention_tokens=entries)
    bound = DecodingEviction(policies.WindowMaxPoolScorer(), group, every=every)
    fixed = policies.SnapKV(retention_tokens=entries)
    return {
        FULL: Plan(None),
        "everything": Plan(policies.FullContext()),
        "fastkv": Plan(fastkv),
        "snapkv": Plan(snapkv),
        "replaykv": Plan(policies.ReplayKV(retention_rate=0.1)),
        "replaykv_drops": Plan(policies.ReplayKV(retention_rate=0.1, tsp_rate=0.4)),
        "gemfilter": Plan(policies.GemFilter(filter_layer=filter_layer, retention_rate=0.1)),
        "spirekv": Plan(policies.SpireKV()),
        "claa": Plan(policies.CLAA()),
        "adakv": Plan(policies.AdaKV(retention_rate=0.1)),
        "streamingllm": Plan(policies.StreamingLLM(retention_rate=0.1)),
        "full_chunks": Plan(None, chunk),
        "fastkv_chunks": Plan(fastkv, chunk),
        "snapkv_chunks": Plan(snapkv, chunk),
        "pyramidinfer": Plan(policies.PyramidInfer()),
        "h2o": Plan(policies.H2O(retention_rate=0.1)),
        "snapkv_fixed": Plan(fixed),
        "snapkv_bounded": Plan(attrs.evolve(fixed, decoding=bound)),
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
    known = dict.fromkeys(job.policy for job in jobs)
    chosen = names_among(parser, "--policies", options.policies, known)
    parts = names_among(parser, "--parts", options.parts, PARTS)
    if not options.minutes > 0:
        parser.error(f"--minutes must be above 0, got {options.minutes}")
    if options.show is None and options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU that torch can see; try --quick")
    options.jobs = [job for job in jobs if job.part in parts and job.policy in chosen]


def perform(run: Run, bench: Bench, jobs: Sequence[Job]) -> None:
    """Measure all cells that have no final result; write the record before and after each.

    The record's ``unfinished`` has the number of starts of every cell that has none.
    """
    record = run.record
    unfinished = record["unfinished"]
    for job in jobs:
        name, rows = str(job), record[job.part]
        if name not in unfinished and any(map(job.is_of, rows)):
            continue
        if bench.deadline.left() <= 0:
            break
        starts = unfinished.get(name, 0)
        unfinished[name] = starts + 1
        rows[:] = [row for row in rows if not job.is_of(row)]
        run.write()
        killed = Cell(**job.place, status=FAILED, note=f"the process ended in it {TRIES} times")
        cell = killed if starts >= TRIES else bench.run(job)
        if bench.deadline.left() > 0 or starts + 1 >= TRIES:
            del unfinished[name]
        row = attrs.asdict(cell)
        run.add(job.part, row | ratios(row, job.part, record))
        if job.policy == FULL:  # a policy may have been measured before
            for part in PARTS:
                record[part] = [each | ratios(each, part, record) for each in record[part]]
    record["complete"] = not unfinished and all(
        any(map(job.is_of, record[job.part])) for job in jobs
    )
    run.write()


def resume(run: Run, path: Path) -> None:
    """Take over the results of an earlier start with the same settings, versions and machine."""
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
    perform(run, bench, options.jobs)
    tables = [each.text(run.record) for each in TABLES]
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


# Tables.


def _unmeasured(row: Row) -> str | None:
    if row["status"] == MEASURED:
        return None
    return f"{row['policy']:<14}{row['context']:>7}  {row['status']}: {row['note']}"[:80]


def _token(row: Row) -> float | None:
    return middle("decode_ms")(row) if row["decode_ms"] else None


def _peak(row: Row) -> float | None:
    peaks = [row["prefill_peak_bytes"], row["decode_peak_bytes"]]
    return None if None in peaks else max(peaks) / 2**30


def _where(row: Row) -> str:
    return row["buffers"] if row["batch"] == 1 else f"{row['buffers']}, {row['batch']} rows"


class CellTable(Table):
    """A table sorted by context, followed by the notes of measured cells."""

    def __init__(self, part: str, *columns: Column) -> None:
        first = Column(part, -14, "policy"), Column("tokens", 7, "context")
        super().__init__(part, *first, *columns, instead=_unmeasured, gap=part != PARTS[0])

    def text(self, record: dict[str, Any]) -> str:
        rows = sorted(record.get(self.part, []), key=lambda row: int(row["context"]))
        if self.gap and not rows:
            return ""
        notes = [
            f"{row['policy']}, {row['context']} tokens: {row['note']}"[:80]
            for row in rows
            if row["status"] == MEASURED and row["note"]
        ]
        return "\n".join([self.header, *map(self.line, rows), *notes])


PREFILL = (
    Column("prefill s", 10, middle("prefill_ms", 1e3), ".3f"),
    Column("x", 6, "prefill_speedup", ".2f"),
)
TOKEN = (Column("decode ms", 10, _token, ".2f"), Column("x", 6, "decode_speedup", ".2f"))
TABLES = (
    CellTable(
        "cells",
        *PREFILL,
        Column("allowed", 8, "prefill_allowed", ".2f"),
        *TOKEN,
        Column("peak GiB", 9, _peak, ".1f"),
        Column("scoring", 8, "scoring_share", ".1%"),
    ),
    CellTable(
        "answers",
        Column("  buffers", -17, lambda row: f"  {_where(row)}"),
        *PREFILL,
        *TOKEN,
        Column("mean x", 7, "mean_speedup", ".2f"),
    ),
    CellTable(
        "compiled",
        Column("compile s", 10, lambda row: row["compile_ms"] / 1e3, ".1f"),
        *TOKEN,
        Column("allowed", 8, "decode_allowed", ".2f"),
        Column("x loop", 8, "loop_speedup", ".2f"),
    ),
)


NOTES = """
x: the time of full context over the policy's, with the same buffers and rows:
above 1 a policy is faster. allowed: the most that operations, or bytes, allow.
x loop: full context in the loop, over the policy's."""
BENCHMARK = Benchmark(
    "gpu", __doc__, measure, OPTIONS, TABLES, notes=NOTES, picture=gpu_picture, settle=choose
)
main, options_of, table = BENCHMARK.main, BENCHMARK.options_of, BENCHMARK.text

if __name__ == "__main__":
    main()
