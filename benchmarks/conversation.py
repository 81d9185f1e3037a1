"""Measure a conversation about one long document: each turn's time, and the bytes held.

Full context and every policy read a document, then take 50 turns of 200 new tokens, one after the
other in every turn, so that a machine that slows down slows down all. A turn is the forward over
its tokens, until the next token is known; the table shows the CPU time. Writes
``conversation.json``.

    python benchmarks/conversation.py [--document 50000] [--turns 50] [--new 200] [--threads 2]
        [--shape small|llama-3.1-8b] [--device cpu] [--out DIR]
    python benchmarks/conversation.py --quick
    python benchmarks/conversation.py --show FILE
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.clocks import timed
from benchmarks.common import TINY, ModelSpec, random_prompt
from benchmarks.gpu import LLAMA
from benchmarks.harness import Benchmark, Column, Option, Row, Run, Table
from benchmarks.turns import held_bytes
from kvpolicy import CachePolicy
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import FastKV, SnapKV

SMALL = ModelSpec(
    hidden_size=256, num_layers=4, query_heads=8, kv_heads=2, intermediate_size=768, vocab_size=1024
)
SHAPES = {
    "tiny": (TINY, torch.float32),
    "small": (SMALL, torch.float32),
    "llama-3.1-8b": (LLAMA, torch.bfloat16),
}
POLICIES: dict[str, CachePolicy | None] = {
    "full_context": None,
    "snapkv": SnapKV(retention_rate=0.1),
    "fastkv": FastKV(tsp_rate=0.2, retention_rate=0.1),
}
AT_THE_ENDS = 5  # number of first turns, and of last turns, whose median is shown
OPTIONS = (
    Option("document", 50000, quick=400, help="tokens"),
    Option("turns", 50, quick=6),
    Option("new", 200, quick=20, help="tokens of a turn"),
    Option("shape", "small", quick="tiny", how={"choices": tuple(SHAPES)}),
    Option("device", "cpu"),
)
# The CPU time: it does not include another program's work, as wall time would.
TABLE = Table(
    "rows",
    Column("policy", -14, "policy"),
    Column("doc. CPU s", 11, lambda row: row["document_cpu_ms"] / 1e3, ".2f"),
    Column("first turns ms", 16, lambda row: median(row["turn_cpu_ms"][:AT_THE_ENDS]), ".1f"),
    Column("last turns ms", 15, lambda row: median(row["turn_cpu_ms"][-AT_THE_ENDS:]), ".1f"),
    Column("held MiB", 10, lambda row: row["held_bytes"][0] / 2**20, ",.1f"),
    Column("then", 9, lambda row: row["held_bytes"][-1] / 2**20, ",.1f"),
)


def converse(model: PreTrainedModel, options: argparse.Namespace) -> list[Row]:
    """Run the conversation and return a row for each policy."""
    vocab_size, device = model.config.vocab_size, model.device
    document = random_prompt(vocab_size, options.document).to(device)
    rows, caches = list[Row](), list[Any]()
    with ExitStack() as attached, torch.inference_mode():
        for name, policy in POLICIES.items():
            cache: Any = DynamicCache(config=model.config)
            if policy is not None:
                cache = PolicyCache(policy)
                attached.enter_context(cache.attached(model))
            _, taken = timed(device, partial(_read, model, document, cache))
            caches.append(cache)
            row: Row = {"policy": name, "document_ms": taken.wall_ms}
            row |= {"document_cpu_ms": taken.cpu_ms, "turn_ms": [], "turn_cpu_ms": []}
            rows.append({**row, "held_bytes": [held_bytes(cache)]})
        for turn in range(options.turns):
            new = random_prompt(vocab_size, options.new + turn)[:, turn:].to(device)
            for row, cache in zip(rows, caches, strict=True):
                if isinstance(cache, PolicyCache):
                    cache.start_turn()
                _, taken = timed(device, partial(_read, model, new, cache))
                row["turn_ms"].append(taken.wall_ms)
                row["turn_cpu_ms"].append(taken.cpu_ms)
                row["held_bytes"].append(held_bytes(cache))
    return rows


def _read(model: PreTrainedModel, ids: Tensor, cache: Any) -> Tensor:
    output = model(ids, cache=cache, use_cache=True, logits_to_keep=1)
    return torch.as_tensor(output.logits[:, -1].argmax(dim=-1))


def measure(run: Run) -> None:
    """Measure the conversation under all policies."""
    options = run.options
    spec, dtype = SHAPES[options.shape]
    torch.backends.cuda.enable_cudnn_sdp(False)  # plans for every new length; see gpu.py
    model = spec.build(options.device, dtype)
    settings = {name: getattr(options, name) for name in ("document", "turns", "new", "shape")}
    run.begin({**settings, "dtype": str(dtype)}, "rows", device=model.device)
    run.add("rows", *converse(model, options))


BENCHMARK = Benchmark("conversation", __doc__, measure, OPTIONS, (TABLE,))
main = BENCHMARK.main

if __name__ == "__main__":
    main()
