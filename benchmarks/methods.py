"""Every registered method against full context on the processor: prefill, decoding, peak memory.

A small Llama of random weights reads prompts of 2,048, 8,192 and 32,768 tokens. In every round each
method has one turn, as has the model without kvpolicy, so that a machine that slows down slows down
all of them; then what each method's own work takes of its prefill. Writes ``methods.json`` after
every length, and a picture.

    python benchmarks/methods.py [--contexts 2048,8192,32768] [--rounds N] [--threads 2] [--out DIR]
    python benchmarks/methods.py --quick
    python benchmarks/methods.py --show FILE
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from transformers import PreTrainedModel

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.common import (
    BASELINE,
    ModelSpec,
    allowed_decode,
    allowed_prefill,
    at_least,
    facts,
    out_folder,
    parser_of,
    ratio_text,
    read_json,
    spread,
    whole_numbers,
    write_json,
)
from benchmarks.common import random_prompt as prompt_of
from benchmarks.memory import try_peak
from benchmarks.overhead import overhead_of, overhead_table
from benchmarks.pictures import draw, methods_picture
from kvpolicy import CachePolicy, build, registered
from kvpolicy.evaluation import Latencies, Timing, measure_latency, shape_of

# 32,768 tokens take about half a minute on two cores.
SMALL = ModelSpec(hidden_size=256, num_layers=8, query_heads=4, kv_heads=2, intermediate_size=768)
TINY = ModelSpec(
    hidden_size=48, num_layers=4, query_heads=6, kv_heads=2, intermediate_size=80, vocab_size=97
)
CONTEXTS = [2048, 8192, 32768]

HEADER = (
    f"{'method':<15}{'tokens':>7}{'prefill s':>10}{'CPU s':>8}{'x (range)':>17}{'allowed':>8}"
    f"{'decode ms':>10}{'x':>5}"
)
MEMORY_HEADER = f"{'method':<15}{'tokens':>7}{'peak MiB':>10}{'of full':>9}{'process MiB':>13}"


def rounds_for(context: int) -> int:
    """Fewer of the long prompts, whose times vary less."""
    return 9 if context < 4096 else 5 if context < 16384 else 3


def all_policies() -> dict[str, CachePolicy]:
    """Every registered policy, with its own defaults."""
    found = {name: build(name) for name in registered("policy")}
    return {name: each for name, each in found.items() if isinstance(each, CachePolicy)}


def row_of(
    name: str,
    timing: Timing,
    baseline: Timing,
    context: int,
    allowed: tuple[float, float] = (1.0, 1.0),
) -> dict[str, Any]:
    """The figures of one method at one length; ratios are of the same round."""
    return {
        "policy": name,
        "context": context,
        "prefill_ms": timing.prefill.wall_ms,
        "prefill_cpu_ms": timing.prefill.cpu_ms,
        "prefill_speedup": spread(timing.prefill.speedups(baseline.prefill)),
        "prefill_allowed": allowed[0],
        "decode_ms": timing.decode.wall_ms,
        "decode_cpu_ms": timing.decode.cpu_ms,
        "decode_speedup": spread(timing.decode.speedups(baseline.decode)),
        "decode_allowed": allowed[1],
        "held_bytes": None if timing.held is None else timing.held.held_bytes,
    }


def rows_of(
    measured: Latencies, policies: dict[str, CachePolicy], model: PreTrainedModel, context: int
) -> list[dict[str, Any]]:
    """The rows of one length, the model without kvpolicy first."""
    rows = [row_of(BASELINE, measured.baseline, measured.baseline, context)]
    shape = shape_of(model.config)
    for name, policy in policies.items():
        allowed = (
            allowed_prefill(policy, shape, context),
            allowed_decode(policy, shape, context, model),
        )
        rows.append(row_of(name, measured.timings[name], measured.baseline, context, allowed))
    return rows


def line_of(row: dict[str, Any]) -> str:
    """One line of the table, at most 80 columns."""
    middle, lowest, highest = (ratio_text(each) for each in row["prefill_speedup"].values())
    extent = f"{middle} ({lowest}-{highest})"
    return (
        f"{row['policy']:<15}{row['context']:>7}{spread(row['prefill_ms'])['median'] / 1e3:>10.2f}"
        f"{spread(row['prefill_cpu_ms'])['median'] / 1e3:>8.2f}{extent:>17}"
        f"{ratio_text(row['prefill_allowed']):>8}{spread(row['decode_ms'])['median']:>10.2f}"
        f"{ratio_text(row['decode_speedup']['median']):>5}"
    )


def memory_line(row: dict[str, Any]) -> str:
    """One line of the table of memory."""
    start = f"{row['policy']:<15}{row['context']:>7}"
    if row["peak"] is None:
        return f"{start}  failed"
    share = "-" if row["share_of_full"] is None else f"{row['share_of_full']:.0%}"
    note = "" if row["peak"]["exact"] else "  at most"
    return (
        f"{start}{row['peak']['growth_bytes'] / 2**20:>10.0f}{share:>9}"
        f"{row['peak']['peak_bytes'] / 2**20:>13.0f}{note}"
    )


def table(record: dict[str, Any]) -> str:
    """Times, the policies' own work, then memory."""
    lines = [HEADER, *map(line_of, record["rows"]), "", overhead_table(record["overhead"])]
    if record["memory"]:
        lines += ["", MEMORY_HEADER, *map(memory_line, record["memory"])]
    return "\n".join(lines)


def memory_rows(
    spec: ModelSpec, names: Sequence[str], context: int, threads: int
) -> list[dict[str, Any]]:
    """Peak memory of the prefill, a fresh process for each method, the baseline's first."""
    rows: list[dict[str, Any]] = []
    for name in (BASELINE, *names):
        peak = try_peak(spec, name, context, threads=threads)
        full = rows[0]["peak"] if rows else peak
        most = full["growth_bytes"] if full else 0
        share = peak["growth_bytes"] / most if peak and most else None
        rows.append({"policy": name, "context": context, "peak": peak, "share_of_full": share})
        print(memory_line(rows[-1]), flush=True)
    return rows


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--contexts", type=whole_numbers, help="default 2048,8192,32768")
    parser.add_argument("--rounds", type=at_least(1), help="default 9, 5 and 3, by length")
    parser.add_argument("--new-tokens", type=at_least(1), default=16, help="decoded; default 16")
    parser.add_argument("--methods", help="with commas between; default all that are registered")
    parser.add_argument(
        "--memory-context", type=at_least(0), help="default 32768; 0 leaves memory out"
    )
    options = parser.parse_args(arguments)
    if options.contexts is None:
        options.contexts = [64, 128] if options.quick else CONTEXTS
    if options.memory_context is None:
        options.memory_context = 128 if options.quick else 32768
    if options.quick:
        options.rounds, options.new_tokens = options.rounds or 1, 2
    known = all_policies()
    chosen = list(known) if options.methods is None else options.methods.split(",")
    if unknown := sorted(set(chosen) - set(known)):
        parser.error(f"--methods must be among {', '.join(known)}, got {', '.join(unknown)}")
    options.policies = {name: known[name] for name in chosen}
    return options


def measure(options: argparse.Namespace, folder: Path) -> None:
    """Measure everything; the result is written after every length."""
    spec = TINY if options.quick else SMALL
    model = spec.build()
    record: dict[str, Any] = {
        "benchmark": "methods",
        "settings": {
            "batch": 1,
            "model": attrs.asdict(spec),
            "dtype": str(model.dtype),
            "rounds": {str(each): options.rounds or rounds_for(each) for each in options.contexts},
            "new_tokens": options.new_tokens,
            "policies": {name: repr(policy) for name, policy in options.policies.items()},
        },
        **facts(model.device),
        "rows": [],
        "overhead": [],
        "memory": [],
    }
    print(HEADER, flush=True)
    for context in options.contexts:
        measured = measure_latency(
            model,
            prompt_of(spec.vocab_size, context)[0].tolist(),
            options.policies,
            rounds=options.rounds or rounds_for(context),
            new_tokens=options.new_tokens,
        )
        rows = rows_of(measured, options.policies, model, context)
        print("\n".join(map(line_of, rows)), flush=True)
        record["rows"] += rows
        for name, policy in options.policies.items():
            prompt = prompt_of(spec.vocab_size, context)
            overhead = overhead_of(model, prompt, policy, 3 if context < 16384 else 1)
            record["overhead"].append({"policy": name, "context": context, **overhead})
        write_json(folder, "methods.json", record)
    print(f"\n{overhead_table(record['overhead'])}", flush=True)
    if options.memory_context:
        print(f"\n{MEMORY_HEADER}", flush=True)
        record["memory"] = memory_rows(
            spec, list(options.policies), options.memory_context, options.threads
        )
        write_json(folder, "methods.json", record)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write and draw."""
    options = options_of(arguments)
    folder = out_folder(options)
    torch.set_num_threads(options.threads)
    path = options.show
    if path is None:
        path = folder / "methods.json"
        measure(options, folder)
    else:
        print(table(read_json(path)))
    record = read_json(path)
    draw(folder, "methods.png", lambda: methods_picture(record))


if __name__ == "__main__":
    main()
