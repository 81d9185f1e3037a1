"""FastKV's latency experiment: prefill and decoding of long prompts on one GPU, method by method.

A model of Llama-3.1-8B's shape, its weights random, made on the device; batch 1; by default 8K, 32K
and 128K tokens of prompt and 256 generated; some methods also read in chunks. Decoding is a loop by
hand; a last stage has `generate` compile it, also where the answer is bounded. Writes ``gpu.json``
after every cell, and a picture.

torch's first choice on a Hopper GPU, cuDNN's attention, makes a plan for every length that it has
not seen: tens of milliseconds for each decoded token, and for each layer where layers hold unlike
numbers. So it is left out unless ``--cudnn`` is given.

    python benchmarks/gpu.py [--minutes 9] [--contexts 8192,32768,131072] [--out DIR]
    python benchmarks/gpu.py --no-compiled             # without the last stage
    python benchmarks/gpu.py --cudnn                   # with cuDNN's attention
    python benchmarks/gpu.py --quick                   # a tiny model on the CPU
    python benchmarks/gpu.py --show FILE               # table and picture of a result
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import attrs
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks import gpu_compiled
from benchmarks.clocks import Deadline
from benchmarks.common import (
    ModelSpec,
    at_least,
    facts,
    number,
    out_folder,
    parser_of,
    read_json,
    whole_numbers,
    write_json,
)
from benchmarks.compiled import compile_config
from benchmarks.gpu_bench import Bench
from benchmarks.gpu_cells import FULL, MEASURED, Cell, Plan, Settings, in_order
from benchmarks.gpu_compiled import CompiledBench, CompiledCell
from benchmarks.pictures import draw, gpu_picture
from kvpolicy import DecodingEviction
from kvpolicy.policies import (
    H2O,
    FastKV,
    GemFilter,
    GQAGroupSelector,
    PyramidInfer,
    SnapKV,
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
TINY = ModelSpec(
    hidden_size=48, num_layers=4, query_heads=6, kv_heads=2, intermediate_size=80, vocab_size=97
)
PRESETS = {"llama-3.1-8b": (LLAMA, torch.bfloat16), "tiny": (TINY, torch.float32)}

# What the comparison is about comes first, what may not fit comes last.
STAGES = (
    (FULL, "fastkv"),
    ("snapkv", "gem_filter", "streaming_llm"),
    ("full_chunks", "fastkv_chunks", "snapkv_chunks"),
    ("pyramid_infer",),
    ("h2o",),
)
# Those whose decoding is compiled, unless others are asked for by name.
COMPILED = (FULL, "fastkv", "snapkv_fixed", "snapkv_bounded")


def plans_for(spec: ModelSpec) -> dict[str, Plan]:
    """The methods with the paper's settings; its filter layer where the model has it.

    ``snapkv_bounded`` chooses anew after every 64 decoded tokens, and ``snapkv_fixed`` holds as
    many entries after the prompt, and lets the answer grow.
    """
    large = spec.num_layers == 32
    chunk, entries = (4096, 1024) if large else (64, 32)
    fastkv, snapkv = FastKV(tsp_rate=0.2, retention_rate=0.1), SnapKV(retention_rate=0.1)
    bound = DecodingEviction(
        WindowMaxPoolScorer(), GQAGroupSelector(retention_tokens=entries), every=64 if large else 2
    )
    return {
        FULL: Plan(None),
        "fastkv": Plan(fastkv),
        "snapkv": Plan(snapkv),
        "gem_filter": Plan(GemFilter(filter_layer=13 if large else None, retention_rate=0.1)),
        "streaming_llm": Plan(StreamingLLM(retention_rate=0.1)),
        "full_chunks": Plan(None, chunk),
        "fastkv_chunks": Plan(fastkv, chunk),
        "snapkv_chunks": Plan(snapkv, chunk),
        "pyramid_infer": Plan(PyramidInfer()),
        "h2o": Plan(H2O(retention_rate=0.1)),
        "snapkv_fixed": Plan(SnapKV(retention_tokens=entries)),
        "snapkv_bounded": Plan(SnapKV(retention_tokens=entries, decoding=bound)),
    }


def sdpa_backend(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> str:
    """The kernel that torch chooses for a causal prefill without a mask at this model's heads."""
    shape = (1, spec.query_heads, 256, spec.hidden_size // spec.query_heads)
    queries = torch.zeros(shape, dtype=dtype, device=device)
    keys = queries[:, : spec.kv_heads]
    try:  # not public, and only a remark: nothing else shall fail with it
        chosen = torch._fused_sdp_choice(queries, keys, keys, is_causal=True, enable_gqa=True)
        return str(torch.nn.attention.SDPBackend(chosen).name).lower()
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return "unknown"


HEADER = (
    f"{'policy':<14}{'tokens':>7}{'prefill s':>10}{'x':>6}{'allowed':>8}"
    f"{'decode ms':>10}{'x':>6}{'peak GiB':>9}{'scoring':>8}"
)


def line_of(cell: dict[str, Any]) -> str:
    """One line of the table, at most 80 columns."""
    start = f"{cell['policy']:<14}{cell['context']:>7}"
    if cell["status"] != MEASURED:
        return f"{start}  {cell['status']}: {cell['note']}"[:80]
    seconds, tokens = median(cell["prefill_ms"]) / 1e3, cell["decode_ms"]
    peaks = [cell["prefill_peak_bytes"], cell["decode_peak_bytes"]]
    peak = None if None in peaks else max(peaks) / 2**30
    return (
        f"{start}{seconds:>10.3f}{number(cell['prefill_speedup'], 6)}"
        f"{number(cell['prefill_allowed'], 8)}{number(median(tokens) if tokens else None, 10)}"
        f"{number(cell['decode_speedup'], 6)}{number(peak, 9, 1)}"
        f"{number(cell['scoring_share'], 8, 1, percent=True)}"
    )


def table(record: dict[str, Any]) -> str:
    """All cells, context by context, and what is to be said of those that were measured."""
    text = _section(HEADER, line_of, record["cells"])
    compiled = record.get("compiled", [])
    if not compiled:
        return text
    return f"{text}\n\n{_section(gpu_compiled.HEADER, gpu_compiled.line_of, compiled)}"


def _section(
    header: str, line: Callable[[dict[str, Any]], str], cells: Sequence[dict[str, Any]]
) -> str:
    cells = sorted(cells, key=lambda cell: cell["context"])
    notes = [
        f"{cell['policy']}, {cell['context']} tokens: {cell['note']}"[:80]
        for cell in cells
        if cell["status"] == MEASURED and cell["note"]
    ]
    return "\n".join([header, *map(line, cells), *notes])


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--preset", choices=PRESETS, help="default llama-3.1-8b")
    parser.add_argument("--device", help="default cuda")
    parser.add_argument("--contexts", type=whole_numbers, help="default 8192,32768,131072")
    parser.add_argument("--new-tokens", type=at_least(2), help="generated; default 256")
    parser.add_argument("--repeats", type=at_least(1), default=3, help="prefills at most; 3")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything; default 9")
    parser.add_argument("--policies", help="with commas between; default all")
    parser.add_argument(
        "--no-compiled", action="store_true", help="without decoding that generate compiles"
    )
    parser.add_argument(
        "--cudnn", action="store_true", help="with cuDNN's attention, where torch takes it"
    )
    options = parser.parse_args(arguments)
    quick = ("tiny", "cpu", [256, 512], 4)
    real = ("llama-3.1-8b", "cuda", [8192, 32768, 131072], 256)
    names = ("preset", "device", "contexts", "new_tokens")
    for name, default in zip(names, quick if options.quick else real, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, default)
    looped = [name for stage in STAGES for name in stage]
    known = [*looped, *(name for name in COMPILED if name not in looped)]
    chosen = looped if options.policies is None else options.policies.split(",")
    if unknown := sorted(set(chosen) - set(known)):
        parser.error(f"--policies must be among {', '.join(known)}, got {', '.join(unknown)}")
    if not options.minutes > 0:
        parser.error(f"--minutes must be above 0, got {options.minutes}")
    if options.show is None and options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU that torch can see; try --quick")
    # A prompt is read whole where decoding is compiled.
    whole = [name for name in known if name in chosen and not name.endswith("_chunks")]
    compiled = COMPILED if options.policies is None else whole
    options.compiled = [] if options.no_compiled else list(compiled)
    options.policies = chosen
    return options


def measure(options: argparse.Namespace, folder: Path, clock: Callable[[], float]) -> None:
    """Measure all cells; the result is written after each."""
    deadline = Deadline(60 * options.minutes, clock)
    spec, dtype = PRESETS[options.preset]
    model = spec.build(options.device, dtype)
    settings = Settings(options.new_tokens, options.repeats)
    torch.backends.cuda.enable_cudnn_sdp(options.cudnn)
    bench = Bench(model, plans_for(spec), settings, deadline, clock)
    cells = [each for each in in_order(STAGES, options.contexts) if each[0] in options.policies]
    compiled = in_order([options.compiled], options.contexts)
    record: dict[str, Any] = {
        "benchmark": "gpu",
        "complete": False,
        "settings": settings_of(options, bench),
        **facts(model.device),
        "cells": [],
        "compiled": [],
    }

    def report(where: str, line: str, cell: Cell | CompiledCell) -> None:
        print(line, flush=True)
        record[where].append(attrs.asdict(cell))
        done = len(record["cells"]) + len(record["compiled"])
        record["complete"] = done == len(cells) + len(compiled)
        write_json(folder, "gpu.json", record)

    print(HEADER, flush=True)
    bench.run(cells, lambda cell: report("cells", line_of(attrs.asdict(cell)), cell))
    if compiled:
        print(f"\n{gpu_compiled.HEADER}", flush=True)
        line = gpu_compiled.line_of
        CompiledBench(bench).run(
            compiled, lambda cell: report("compiled", line(attrs.asdict(cell)), cell)
        )


def settings_of(options: argparse.Namespace, bench: Bench) -> dict[str, Any]:
    """What a result says of how it came to be."""
    spec, dtype = PRESETS[options.preset]
    model, plans = bench.model, bench.plans
    compiling = compile_config(model.device)
    return {
        **attrs.asdict(bench.settings),
        "minutes": options.minutes,
        "batch": 1,
        "model": {"preset": options.preset, **attrs.asdict(spec)},
        "dtype": str(dtype),
        "attention": model.config._attn_implementation,
        "sdpa_backend": sdpa_backend(spec, dtype, model.device),
        "policies": {
            name: "DynamicCache" if plans[name].policy is None else repr(plans[name].policy)
            for name in options.policies
        },
        "chunks": {
            name: plans[name].chunk for name in options.policies if plans[name].chunk is not None
        },
        "compiled": {
            "policies": {
                name: "StaticCache" if plans[name].policy is None else repr(plans[name].policy)
                for name in options.compiled
            },
            "config": "by generate itself" if compiling is None else compiling.to_dict(),
        },
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write and draw."""
    options = options_of(arguments)
    folder = out_folder(options)
    torch.set_num_threads(options.threads)
    path = options.show
    if path is None:
        path = folder / "gpu.json"
        measure(options, folder, time.monotonic)
    print()
    record = read_json(path)
    print(table(record))
    draw(folder, "gpu.png", lambda: gpu_picture(record))


if __name__ == "__main__":
    main()
