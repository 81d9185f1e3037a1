"""A model of Llama-3.2-1B's shape on the CPU: prefill, decoding and memory.

Random weights; prompts are read whole and in chunks, and every way of reading takes its turn in
every round. The type of the weights is the one whose matrix product is faster on this machine,
unless it is said. Peak memory is the process's while the prompt is read, beyond what it held
before. Writes ``real_shape.json``.

    python benchmarks/real_shape.py [--contexts 4096,8192] [--rounds 3] [--threads 2] [--out DIR]
    python benchmarks/real_shape.py --quick
    python benchmarks/real_shape.py --show FILE
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.common import (
    ModelSpec,
    allowed_decode,
    allowed_prefill,
    at_least,
    facts,
    number,
    out_folder,
    parser_of,
    random_prompt,
    read_json,
    spread,
    whole_numbers,
    write_json,
)
from benchmarks.gpu_cells import FULL, Plan
from benchmarks.memory import peak_bytes, reset_peak, resident_bytes
from benchmarks.turns import take_turn
from kvpolicy.evaluation import shape_of
from kvpolicy.policies import FastKV, GemFilter, SnapKV

LLAMA_1B = ModelSpec(
    hidden_size=2048,
    num_layers=16,
    query_heads=32,
    kv_heads=8,
    intermediate_size=8192,
    vocab_size=128256,
)
TINY = ModelSpec(
    hidden_size=48, num_layers=4, query_heads=6, kv_heads=2, intermediate_size=80, vocab_size=97
)
HEADER = (
    f"{'policy':<15}{'tokens':>7}{'prefill s':>10}{'x (range)':>18}{'allowed':>8}"
    f"{'token ms':>9}{'x':>6}"
)


def plans(chunk: int) -> dict[str, Plan]:
    """What is measured, by name."""
    policies = {
        FULL: None,
        "snapkv": SnapKV(retention_rate=0.1),
        "fastkv": FastKV(tsp_rate=0.2, retention_rate=0.1),
        "gem_filter": GemFilter(retention_rate=0.1),
    }
    whole = {name: Plan(policy) for name, policy in policies.items()}
    return whole | {f"{name}_chunks": Plan(each.policy, chunk) for name, each in whole.items()}


def faster_type(size: int = 2048) -> torch.dtype:
    """Of float32 and bfloat16, the one in which this machine multiplies matrices faster."""
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
    """Give what is not used any more back to the system, where the C library can."""
    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except OSError:  # another C library keeps it
        return


def measure(model: PreTrainedModel, plan: Plan, context: int, new_tokens: int) -> dict[str, Any]:
    """One turn: seconds of the prompt, on the clock and of the processor; tokens; memory."""
    prompt = random_prompt(model.config.vocab_size, context)
    free_memory()
    reset_peak()
    before, cpu = resident_bytes(), time.process_time()
    turn = take_turn(model, prompt, plan.policy, new_tokens, chunk=plan.chunk)
    return {
        "prefill_ms": turn.prefill.wall_ms,
        "decode_ms": sorted(each.wall_ms for each in turn.decode)[len(turn.decode) // 2],
        "turn_cpu_ms": (time.process_time() - cpu) * 1e3,
        "growth_bytes": max(peak_bytes() - before, 0),
        "held_bytes": turn.held_bytes,
    }


def rows_of(model: PreTrainedModel, options: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """For each context a row of each plan, from rounds in which all take their turn."""
    shape = shape_of(model.config)
    for context in options.contexts:
        found = []
        chosen = plans(options.chunk)
        for plan in chosen.values():  # what a first call brings along is not the prompt's
            take_turn(model, random_prompt(model.config.vocab_size, 64), plan.policy, 2)
        rounds: list[dict[str, dict[str, Any]]] = []
        for _ in range(options.rounds):
            of_round = {}
            for name, plan in chosen.items():
                of_round[name] = measure(model, plan, context, options.new_tokens)
                seconds = of_round[name]["prefill_ms"] / 1e3
                print(f"  {name} {context} {seconds:.2f} s", file=sys.stderr, flush=True)
            rounds.append(of_round)
        for name, plan in chosen.items():
            row: dict[str, Any] = {"policy": name, "context": context, "chunk": plan.chunk}
            for key in rounds[0][name]:
                row[key] = [each[name][key] for each in rounds]
            for key in ("prefill", "decode"):
                ratios = [each[FULL][f"{key}_ms"] / each[name][f"{key}_ms"] for each in rounds]
                row[f"{key}_speedup"] = spread(ratios)
            policy = plan.policy
            row["prefill_allowed"] = (
                1.0 if policy is None else allowed_prefill(policy, shape, context)
            )
            row["decode_allowed"] = (
                1.0 if policy is None else allowed_decode(policy, shape, context, model)
            )
            found.append(row)
        yield found


def line_of(row: dict[str, Any]) -> str:
    """One line of the table, at most 80 columns."""
    middle = len(row["prefill_ms"]) // 2
    prefill, token = (sorted(row[key])[middle] for key in ("prefill_ms", "decode_ms"))
    speed = row["prefill_speedup"]
    ratio = f"{speed['median']:.2f} ({speed['lowest']:.2f}-{speed['highest']:.2f})"
    return (
        f"{row['policy']:<15}{row['context']:>7}{prefill / 1e3:>10.2f}{ratio:>18}"
        f"{number(row['prefill_allowed'], 8)}{token:>9.1f}"
        f"{number(row['decode_speedup']['median'], 6)}"
    )


def memory_line(row: dict[str, Any]) -> str:
    """What the prompt took, beyond the weights."""
    growth, held = max(row["growth_bytes"]) / 2**20, row["held_bytes"][0] / 2**20
    return f"{row['policy']:<15}{row['context']:>7}{growth:>12,.0f}{held:>12,.1f}"


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--contexts", type=whole_numbers, help="default 4096,8192")
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--chunk", type=at_least(1), help="tokens read at once; default 1024")
    parser.add_argument("--new-tokens", type=at_least(2), default=9, help="generated; default 9")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default the faster")
    options = parser.parse_args(arguments)
    options.contexts = options.contexts or ([256] if options.quick else [4096, 8192])
    options.chunk = options.chunk or (96 if options.quick else 1024)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    options = options_of(arguments)
    folder = out_folder(options)
    if options.show is None:
        torch.set_num_threads(options.threads)
        dtype = getattr(torch, options.dtype) if options.dtype else faster_type()
        spec = TINY if options.quick else LLAMA_1B
        model = spec.build(dtype=dtype)
        settings = {
            "dtype": str(dtype),
            "rounds": options.rounds,
            "chunk": options.chunk,
            "new_tokens": options.new_tokens,
            "model": spec.config().to_dict(),
        }
        rows: list[dict[str, Any]] = []
        record = {
            "benchmark": "real_shape",
            "settings": settings,
            **facts(model.device),
            "rows": rows,
        }
        for of_context in rows_of(model, options):  # written at once: hours may lie between
            rows += of_context
            write_json(folder, "real_shape.json", record)
    else:
        record = read_json(options.show)
    print(HEADER)
    print("\n".join(map(line_of, record["rows"])))
    print(f"\n{'policy':<15}{'tokens':>7}{'peak MiB':>12}{'held MiB':>12}")
    print("\n".join(map(memory_line, record["rows"])))


if __name__ == "__main__":
    main()
