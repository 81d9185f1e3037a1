"""Compare the estimated memory of sessions with measured memory.

    python benchmarks/sessions.py [--device cuda] [--quick] [--out FOLDER]
    python benchmarks/sessions.py --show FILE

On the processor, the bytes of live tensors are counted during a real run. Some cells are also run
in a separate process, whose high-water mark is read from the kernel. On a GPU, torch counts what it
has allocated. Models have random weights; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.common import random_model
from benchmarks.harness import Benchmark, Column, Option, Row, Run, Table
from benchmarks.memory import peak_bytes, reset_peak, resident_bytes
from kvpolicy import CachePolicy
from kvpolicy.evaluation import shape_of
from kvpolicy.evaluation.cost.activations import ModelMemory
from kvpolicy.evaluation.cost.live_bytes import LiveBytes
from kvpolicy.evaluation.cost.session import Session, session_of
from kvpolicy.evaluation.results import environment
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import H2O, AdaKV, FastKV, FullContext, GemFilter, SnapKV

# Sizes by device: small ones on a processor; on a GPU those of 8B models, but with fewer layers.
SIZES: dict[str, dict[str, Any]] = {
    "cpu": {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
    },
    "cuda": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 6,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "sliding window": ("gemma3_text", {"sliding_window": 512, "sliding_window_pattern": 3}),
    "hybrid": ("lfm2", {"layer_types": ["conv", "full_attention"] * 3}),
}
ANSWER, BOUND, EVERY = 160, 256, 64
M_MMAP_THRESHOLD = -3  # of glibc's mallopt


OPTIONS = (Option("device", "cpu", how={"choices": tuple(SIZES)}),)


def _share(figure: str) -> Any:
    return lambda row: row[f"{figure}_estimated"] / row[f"{figure}_measured"]


def _refused(row: Row) -> str | None:
    return f"{row['family']:<15}{row['policy']:<13}{row['refused']}" if "refused" in row else None


TABLE = Table(
    "rows",
    Column("family", -15, "family"),
    Column("policy", -13, "policy"),
    Column("chunk", 6, "chunk"),
    Column("answer", 9, lambda row: "bounded" if row["bounded"] else "all"),
    Column("peak MB", 10, lambda row: row["peak_measured"] / 1e6, ".1f"),
    Column("told", 6, _share("peak"), ".2f"),
    Column("held MB", 10, lambda row: row["held_measured"] / 1e6, ".1f"),
    Column("told", 6, _share("held"), ".2f"),
    instead=_refused,
)


def policies(bounded: bool) -> dict[str, CachePolicy]:
    """Return policies by name; if ``bounded``, those that also bound the answer."""
    rules = {
        "snapkv": lambda rule: SnapKV(0.1, decoding=rule),
        "adakv": lambda rule: AdaKV(0.1, decoding=rule),
        "h2o": lambda rule: H2O(0.1, decoding=rule),
        "fastkv": lambda rule: FastKV(decoding=rule),
    }
    if bounded:
        plain = {"snapkv": SnapKV(), "adakv": AdaKV(), "h2o": H2O(), "fastkv": FastKV()}
        return {name: rules[name](plain[name].decoding_rule(BOUND, EVERY)) for name in rules}
    made = {name: make(None) for name, make in rules.items()}
    return {"full_context": FullContext(), **made, "gemfilter": GemFilter()}


def build(family: str, device: str, context: int) -> PreTrainedModel:
    """Build a model with random weights."""
    model_type, own = FAMILIES[family]
    config = AutoConfig.for_model(
        model_type,
        **SIZES[device],
        **own,
        max_position_embeddings=2 * context,
        eos_token_id=None,
        pad_token_id=0,
    )
    return random_model(config, device, torch.float32 if device == "cpu" else torch.bfloat16)


def answered(
    model: PreTrainedModel, policy: CachePolicy, prompt: Tensor, chunk: int | None
) -> PolicyCache:
    """Read a prompt and decode an answer; return the cache."""
    cache = PolicyCache(policy, max_new_tokens=ANSWER)
    chunks = {} if chunk is None else {"prefill_chunk_size": chunk}
    model.generate(prompt, cache=cache, max_new_tokens=ANSWER, do_sample=False, **chunks)
    return cache


def measured(
    model: PreTrainedModel, policy: CachePolicy, prompt: Tensor, chunk: int | None
) -> tuple[int, int]:
    """Return a session's peak bytes besides the weights, and its bytes at the end."""
    if prompt.device.type == "cuda":
        gc.collect()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        cache = answered(model, policy, prompt, chunk)
        gc.collect()
        end = torch.cuda.memory_allocated() - before
        peak = torch.cuda.max_memory_allocated() - before
        del cache
        return peak, end
    with LiveBytes([*model.parameters(), *model.buffers()]) as live:
        cache = answered(model, policy, prompt, chunk)
        gc.collect()
        end = live.live
        del cache
    return live.peak, end


def random_prompt(model: PreTrainedModel, context: int) -> Tensor:
    """Return random token ids that are never padding."""
    drawn = torch.Generator().manual_seed(0)
    ids = torch.randint(1, model.config.vocab_size, (1, context), generator=drawn)
    return ids.to(model.device)


def measure_family(run: Run, family: str, context: int, chunk: int) -> None:
    """Measure every policy, way of reading and way of answering on one model."""
    device = run.options.device
    model = build(family, device, context)
    memory = ModelMemory(model.config, family, model.dtype, "sdpa")
    shape = shape_of(model.config, family)
    prompt = random_prompt(model, context)
    answered(model, SnapKV(0.1), prompt[:, :128], None)  # code, workspaces
    for bounded in (False, True):
        for name, policy in policies(bounded).items():
            for size in (None, chunk):
                told = session_of(policy, shape, memory, context, ANSWER, chunk=size, device=device)
                row: Row = {"family": family, "policy": name, "chunk": size, "bounded": bounded}
                try:
                    peak, end = measured(model, policy, prompt, size)
                except ValueError as error:  # such as a restart beyond a sliding window
                    run.add("rows", row | {"refused": str(error)[:120]})
                    continue
                run.add(
                    "rows", row | _numbers(told) | {"peak_measured": peak, "held_measured": end}
                )


def _numbers(told: Session) -> Row:
    return {
        "peak_estimated": told.peak,
        "peak_when": told.peak_when,
        "held_estimated": told.held,
        "kept_estimated": told.kept,
    }


def process_row(context: int, policy: str, chunk: int | None) -> Row:
    """Measure one session in a new process on the processor, by its peak memory."""
    wanted = json.dumps({"context": context, "policy": policy, "chunk": chunk})
    command = [sys.executable, __file__, "--process", wanted]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: Row = json.loads(done.stdout.splitlines()[-1])
    print(found, flush=True)
    return found


def in_process(wanted: Row) -> Row:
    """Measure one session inside the new process."""
    context, chunk = wanted["context"], wanted["chunk"]
    torch.set_num_threads(1)
    # Each large tensor gets its own block: memory that is freed between others would stay resident.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    model = build("llama", "cpu", context)
    policy, prompt = policies(False)[wanted["policy"]], random_prompt(model, context)
    memory = ModelMemory(model.config, "llama", model.dtype, "sdpa")
    told = session_of(
        policy, shape_of(model.config), memory, context, ANSWER, chunk=chunk, device="cpu"
    )
    answered(model, policy, prompt[:, :128], None)
    gc.collect()
    reset = reset_peak()
    before = resident_bytes()
    answered(model, policy, prompt, chunk)
    growth = peak_bytes() - before
    return {**wanted, "peak_estimated": told.peak, "growth_measured": growth, "reset": reset}


def file_of(options: argparse.Namespace) -> str:
    """Return the name of the results file; results of a GPU have their own."""
    return "sessions.json" if options.device == "cpu" else "sessions_gpu.json"


def measure(run: Run) -> None:
    """Measure all model families, then a few sessions in new processes."""
    options = run.options
    context, chunk = (4096, 512) if options.device == "cpu" else (32768, 2048)
    if options.quick:
        context, chunk = context // 4, chunk // 4
    run.record = {
        "environment": environment(torch.device(options.device)),
        "device": options.device,
        "model": SIZES[options.device],
        "context": context,
        "answer": ANSWER,
        "bound": {"tokens": BOUND, "every": EVERY},
        "rows": [],
        "processes": [],
    }
    for family in list(FAMILIES)[:1] if options.quick else FAMILIES:
        measure_family(run, family, context, chunk)
    if options.device == "cpu" and not options.quick:
        for name in ("full_context", "snapkv", "fastkv"):
            for size in (None, 1024):
                run.add("processes", process_row(16384, name, size))


BENCHMARK = Benchmark("sessions", __doc__, measure, OPTIONS, (TABLE,), file=file_of, threads=1)
main = BENCHMARK.main

if __name__ == "__main__":
    if sys.argv[1:2] == ["--process"]:
        print(json.dumps(in_process(json.loads(sys.argv[2]))))
    else:
        main()
