"""Compare prefill times with full context, and with the largest possible speed-up.

Models of random weights (16 layers, hidden size 512) on the CPU read prompts of 4,096 and 8,192
tokens: a Llama, one shaped like Qwen3-Next (three recurrent layers to one that attends) and one
shaped like DeepSeek V3 (latent attention), both with experts. Every policy takes its turn in every
round, so that a machine that becomes slower affects all of them. Writes ``prefill.json``, or
``prefill_MODEL.json`` for others than the Llama.

    python benchmarks/prefill.py [--model llama] [--lengths 4096 8192] [--rounds 7] [--threads 2]
        [--out DIR]
    python benchmarks/prefill.py --quick
    python benchmarks/prefill.py --show FILE
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from benchmarks.harness import Benchmark, Column, Option, Row, Run, Table, at_least, middle
from benchmarks.operations import operations
from kvpolicy import CachePolicy
from kvpolicy.evaluation import Latencies, measure_latency
from kvpolicy.policies import FastKV, FullContext, SnapKV, StreamingLLM

LENGTHS = (4096, 8192)
POLICIES: dict[str, CachePolicy] = {
    "full_context": FullContext(),
    "streamingllm": StreamingLLM(0.1),
    "snapkv": SnapKV(0.1),
    "fastkv": FastKV(tsp_rate=0.2, retention_rate=0.1),
}


_SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "max_position_embeddings": 2 * max(LENGTHS),
    "eos_token_id": None,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 256}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_key_value_heads": 2, "intermediate_size": 1536}),
    "qwen3_next": (
        "qwen3_next",
        {
            "num_key_value_heads": 2,
            "head_dim": 64,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "num_experts": 8,
            "shared_expert_intermediate_size": 256,
            **_EXPERTS,
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        {
            "num_key_value_heads": 8,
            "q_lora_rank": 256,
            "kv_lora_rank": 128,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
            "intermediate_size": 1536,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            **_EXPERTS,
        },
    ),
}


OPTIONS = (
    Option("model", "llama", how={"choices": tuple(MODELS)}),
    Option("rounds", 7, quick=1),
    Option("lengths", LENGTHS, at_least(1), quick=(64,), how={"nargs": "+"}),
)


def _range(row: Row) -> str:
    return f"{row['speedup']:.2f} ({row['speedup_lowest']:.2f}-{row['speedup_highest']:.2f})"


TABLE = Table(
    "rows",
    Column("policy", -15, "policy"),
    Column("tokens", 7, "context"),
    Column("prefill ms", 12, middle("prefill_ms"), ".0f"),
    Column("speed-up (range)", 21, _range),
    Column("allowed", 9, "allowed", ".2f"),
    Column("decode x", 10, "decode_speedup", ".2f"),
)


def random_model(name: str = "llama", **sizes: Any) -> PreTrainedModel:
    """Build the model of all runs, always with the same random weights.

    Args:
        name: One of `MODELS`.
        sizes: Sizes of the configuration, instead of those in `MODELS`.
    """
    kind, own = MODELS[name]
    return common.random_model(AutoConfig.for_model(kind, **{**_SIZES, **own, **sizes}))


def allowed_speedup(model: PreTrainedModel, policy: CachePolicy, context_len: int) -> float:
    """Return the largest possible speed-up: a full prefill's operations over the policy's."""
    full, own = (operations(each, model, context_len).layers for each in (None, policy))
    return full / own


def row_of(name: str, length: int, measured: Latencies, model: PreTrainedModel) -> Row:
    """Return the results of one policy at one length."""
    timing, baseline = measured.timings[name], measured.baseline
    ratios = timing.prefill.speedups(baseline.prefill)
    return {
        "policy": name,
        "context": length,
        "prefill_ms": timing.prefill.wall_ms,
        "prefill_cpu_ms": timing.prefill.cpu_ms,
        "full_prefill_ms": baseline.prefill.wall_ms,
        "speedup": timing.prefill.speedup(baseline.prefill),
        "speedup_lowest": min(ratios),
        "speedup_highest": max(ratios),
        "allowed": allowed_speedup(model, POLICIES[name], length),
        "decode_ms": timing.decode.wall_ms,
        "decode_speedup": timing.decode.speedup(baseline.decode),
    }


def file_of(options: argparse.Namespace) -> str:
    """Return the name of the results file, which names the model unless it is the Llama."""
    return "prefill.json" if options.model == "llama" else f"prefill_{options.model}.json"


def measure(run: Run) -> None:
    """Measure every policy at every length."""
    options, model = run.options, random_model(run.options.model)
    settings = {"rounds": options.rounds, "batch": 1, "model": model.config.to_dict()}
    run.begin(settings, "rows")
    for length in options.lengths:
        prompt = torch.randint(model.config.vocab_size, (length,)).tolist()
        measured = measure_latency(model, prompt, POLICIES, rounds=options.rounds, new_tokens=16)
        run.add("rows", *(row_of(name, length, measured, model) for name in POLICIES))


BENCHMARK = Benchmark("prefill", __doc__, measure, OPTIONS, (TABLE,), file=file_of)
main = BENCHMARK.main

if __name__ == "__main__":
    main()
