"""Measure prefill and decoding of long prompts on one GPU by method, as the FastKV paper does.

The model has Llama-3.1-8B's shape and random weights, and is made on the device. The batch is 1; by
default a prompt has 8K, 32K or 128K tokens and 256 tokens are generated. Some methods also read in
chunks. Decoding is a hand-written loop; in a last stage `generate` compiles it, also with a bounded
answer. Writes ``gpu.json``
after every cell, and a picture.

On a Hopper GPU torch prefers cuDNN's attention, which makes a plan for every new length. This takes
tens of milliseconds for each decoded token, and for each layer if layers hold different numbers of
tokens. So it is disabled unless ``--cudnn`` is given.

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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.clocks import Deadline
from benchmarks.common import TINY, ModelSpec
from benchmarks.compiled import compile_config
from benchmarks.gpu_bench import Bench
from benchmarks.gpu_cells import FULL, Plan, Settings, in_order
from benchmarks.gpu_compiled import CompiledBench
from benchmarks.gpu_tables import CELLS, COMPILED_CELLS
from benchmarks.harness import Benchmark, Option, Run, at_least
from benchmarks.pictures import gpu_picture
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
PRESETS = {"llama-3.1-8b": (LLAMA, torch.bfloat16), "tiny": (TINY, torch.float32)}

# The main comparison comes first; methods that may not fit in memory come last.
STAGES = (
    (FULL, "fastkv"),
    ("snapkv", "gem_filter", "streaming_llm"),
    ("full_chunks", "fastkv_chunks", "snapkv_chunks"),
    ("pyramid_infer",),
    ("h2o",),
)
# Policies whose decoding is compiled, unless others are asked for by name.
COMPILED = (FULL, "fastkv", "snapkv_fixed", "snapkv_bounded")


OPTIONS = (
    Option("preset", "llama-3.1-8b", quick="tiny", how={"choices": tuple(PRESETS)}),
    Option("device", "cuda", quick="cpu"),
    Option("contexts", [8192, 32768, 131072], quick=[256, 512]),
    Option("new-tokens", 256, at_least(2), quick=4, help="generated"),
    Option("repeats", 3, help="prefills at most"),
    Option("minutes", 9.0, float, help="for everything"),
    Option("policies", help="with commas between; default all"),
    Option("no-compiled", False, help="without decoding that generate compiles"),
    Option("cudnn", False, help="with cuDNN's attention, where torch takes it"),
)


def plans_for(spec: ModelSpec) -> dict[str, Plan]:
    """Return the methods with the paper's settings, for a model of 32 layers.

    ``snapkv_bounded`` chooses again after every 64 decoded tokens. ``snapkv_fixed`` holds the same
    number of entries after the prompt, and lets the answer grow.
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
    """Find the policies named on the command line, and check the other options."""
    looped = [name for stage in STAGES for name in stage]
    known = [*looped, *(name for name in COMPILED if name not in looped)]
    chosen = looped if options.policies is None else options.policies.split(",")
    if unknown := sorted(set(chosen) - set(known)):
        parser.error(f"--policies must be among {', '.join(known)}, got {', '.join(unknown)}")
    if not options.minutes > 0:
        parser.error(f"--minutes must be above 0, got {options.minutes}")
    if options.show is None and options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU that torch can see; try --quick")
    # If decoding is compiled, the prompt is read whole.
    whole = [name for name in known if name in chosen and not name.endswith("_chunks")]
    compiled = COMPILED if options.policies is None else whole
    options.compiled = [] if options.no_compiled else list(compiled)
    options.policies = chosen


def measure(run: Run) -> None:
    """Measure all cells before the deadline, and write the result after each."""
    options = run.options
    deadline = Deadline(60 * options.minutes, time.monotonic)
    spec, dtype = PRESETS[options.preset]
    model = spec.build(options.device, dtype)
    torch.backends.cuda.enable_cudnn_sdp(options.cudnn)
    settings = Settings(options.new_tokens, options.repeats)
    bench = Bench(model, plans_for(spec), settings, deadline, time.monotonic)
    cells = [each for each in in_order(STAGES, options.contexts) if each[0] in options.policies]
    compiled = in_order([options.compiled], options.contexts)
    head = run.begin(settings_of(options, bench), "cells", "compiled", device=model.device)
    run.record = {"benchmark": "gpu", "complete": False, **head}

    def report(part: str) -> Callable[[Any], None]:
        def add(cell: Any) -> None:
            done = len(run.record["cells"]) + len(run.record["compiled"]) + 1
            run.record["complete"] = done == len(cells) + len(compiled)
            run.add(part, attrs.asdict(cell))

        return add

    bench.run(cells, report("cells"))
    CompiledBench(bench).run(compiled, report("compiled"))
    print(f"\n{table(run.record)}")


def settings_of(options: argparse.Namespace, bench: Bench) -> dict[str, Any]:
    """Return the settings that a result records."""
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


BENCHMARK = Benchmark(
    "gpu",
    __doc__,
    measure,
    OPTIONS,
    (CELLS, COMPILED_CELLS),
    picture=gpu_picture,
    settle=choose,
)
main, options_of, table = BENCHMARK.main, BENCHMARK.options_of, BENCHMARK.text

if __name__ == "__main__":
    main()
