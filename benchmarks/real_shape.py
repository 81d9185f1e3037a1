"""Measure a model with Llama-3.2-1B's shape on the CPU: prefill, decoding and memory.

The weights are random. Prompts are read whole and in chunks, and every way of reading takes its
turn in every round. The type of the weights is the one whose matrix product is faster on this
machine, unless it is given. Peak memory is the process's growth during a turn. Writes
``real_shape.json``.

    python benchmarks/real_shape.py [--contexts 4096,8192] [--rounds 3] [--threads 2] [--out DIR]
    python benchmarks/real_shape.py --quick
    python benchmarks/real_shape.py --show FILE
"""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median

import torch
from transformers import PreTrainedModel

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.common import TINY, ModelSpec, allowed, random_prompt, spread
from benchmarks.gpu_cells import FULL, Plan
from benchmarks.harness import (
    Benchmark,
    Column,
    Option,
    Row,
    Run,
    Table,
    at_least,
    extent,
    in_turns,
    middle,
    ratios,
)
from benchmarks.memory import peak_bytes, reset_peak, resident_bytes
from benchmarks.turns import take_turn
from kvpolicy.policies import FastKV, GemFilter, SnapKV

LLAMA_1B = ModelSpec(
    hidden_size=2048,
    num_layers=16,
    query_heads=32,
    kv_heads=8,
    intermediate_size=8192,
    vocab_size=128256,
)
OPTIONS = (
    Option("contexts", [4096, 8192], quick=[256]),
    Option("rounds", 3),
    Option("chunk", 1024, quick=96, help="tokens read at once"),
    Option("new-tokens", 9, at_least(2), help="generated"),
    Option("dtype", help="default the faster", how={"choices": ("float32", "bfloat16")}),
)
_PLACE = (Column("policy", -15, "policy"), Column("tokens", 7, "context"))
TABLES = (
    Table(
        "rows",
        *_PLACE,
        Column("prefill s", 10, middle("prefill_ms", 1e3), ".2f"),
        Column("x (range)", 18, extent("prefill_speedup")),
        Column("allowed", 8, "prefill_allowed", ".2f"),
        Column("token ms", 9, middle("decode_ms"), ".1f"),
        Column("x", 6, lambda row: row["decode_speedup"]["median"], ".2f"),
    ),
    Table(  # what the prompt took, beyond the weights
        "rows",
        *_PLACE,
        Column("peak MiB", 12, lambda row: max(row["growth_bytes"]) / 2**20, ",.0f"),
        Column("held MiB", 12, lambda row: row["held_bytes"][0] / 2**20, ",.1f"),
        live=False,
        gap=True,
    ),
)


def plans(chunk: int) -> dict[str, Plan]:
    """Return the plans to measure, by name."""
    policies = {
        FULL: None,
        "snapkv": SnapKV(retention_rate=0.1),
        "fastkv": FastKV(tsp_rate=0.2, retention_rate=0.1),
        "gemfilter": GemFilter(retention_rate=0.1),
    }
    whole = {name: Plan(policy) for name, policy in policies.items()}
    return whole | {f"{name}_chunks": Plan(each.policy, chunk) for name, each in whole.items()}


def faster_type(size: int = 2048) -> torch.dtype:
    """Return the faster of float32 and bfloat16 for matrix products on this machine."""
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
        times = []
        for _ in range(4):
            begin = time.perf_counter()
            a @ b
            times.append(time.perf_counter() - begin)
        seconds[dtype] = min(times[1:])
    return min(seconds, key=lambda dtype: seconds[dtype])


def free_memory() -> None:
    """Return unused memory to the operating system, if the C library can."""
    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except OSError:  # another C library keeps it
        return


def one_turn(model: PreTrainedModel, plan: Plan, context: int, new_tokens: int) -> Row:
    """Run one prompt and answer; return times of prompt, token and CPU, and memory."""
    prompt = random_prompt(model.config.vocab_size, context)
    free_memory()
    reset_peak()
    before, cpu = resident_bytes(), time.process_time()
    turn = take_turn(model, prompt, plan.policy, new_tokens, chunk=plan.chunk)
    return {
        "prefill_ms": turn.prefill.wall_ms,
        "decode_ms": median(each.wall_ms for each in turn.decode),
        "turn_cpu_ms": (time.process_time() - cpu) * 1e3,
        "growth_bytes": max(peak_bytes() - before, 0),
        "held_bytes": turn.held_bytes,
    }


def rows_at(run: Run, model: PreTrainedModel, context: int) -> list[Row]:
    """Return a row for each plan, from rounds in which every plan takes its turn."""
    options, chosen = run.options, plans(run.options.chunk)
    for plan in chosen.values():  # a first call, so that one-time work is not counted
        take_turn(model, random_prompt(model.config.vocab_size, 64), plan.policy, 2)
    turns = {
        name: partial(one_turn, model, plan, context, options.new_tokens)
        for name, plan in chosen.items()
    }

    def say(turn: int) -> None:
        print(f"  {context} tokens, round {turn} of {options.rounds}", file=sys.stderr, flush=True)

    taken = in_turns(turns, options.rounds, warm_up=False, done=say)
    columns = {
        name: {key: [each[key] for each in found] for key in found[0]}
        for name, found in taken.items()
    }
    rows = []
    for name, plan in chosen.items():
        own, full = columns[name], columns[FULL]
        row: Row = {"policy": name, "context": context, "chunk": plan.chunk, **own}
        for key in ("prefill", "decode"):
            row[f"{key}_speedup"] = spread(ratios(full[f"{key}_ms"], own[f"{key}_ms"]))
        rows.append(row | allowed(plan.policy, context, model))
    return rows


def measure(run: Run) -> None:
    """Measure every plan at every length."""
    options, spec = run.options, TINY if run.options.quick else LLAMA_1B
    dtype = getattr(torch, options.dtype) if options.dtype else faster_type()
    model = spec.build(dtype=dtype)
    settings = {name: getattr(options, name) for name in ("rounds", "chunk", "new_tokens")}
    settings = {"dtype": str(dtype), **settings, "model": spec.config().to_dict()}
    run.begin(settings, "rows")
    for context in options.contexts:
        run.add("rows", *rows_at(run, model, context))


BENCHMARK = Benchmark("real_shape", __doc__, measure, OPTIONS, TABLES)
main = BENCHMARK.main

if __name__ == "__main__":
    main()
