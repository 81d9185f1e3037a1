"""Measure methods on the word tasks, with the question known before or after eviction.

Run as ``python -m benchmarks.ruler_words.measure``. ``with`` reads the document and the question
together, so that a method may look at the question when it chooses; ``later`` reads the document,
lets the method choose, and only then reads the question. A method that was measured is not measured
again: ``--out`` is read first, and is written after every method.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.answers import MODES, continuations, word_score
from benchmarks.harness import RESULTS as FOLDER
from benchmarks.harness import Ledger
from kvpolicy import CachePolicy
from kvpolicy.evaluation.comparison.variant import Variant, variants
from kvpolicy.evaluation.results import environment
from kvpolicy.evaluation.tasks.ruler_words import KINDS, MODEL_DIR, WordPrompt, prompts

RESULTS = FOLDER / "ruler_words.json"
RATES = (0.05, 0.1, 0.2)
# Methods that keep tokens of text; methods for images are left out.
METHODS = (
    "full_context", "snapkv", "fastkv", "adakv", "pyramidkv", "h2o", "tova", "keydiff",
    "kvzip",
    "key_norm", "streamingllm", "gemfilter", "pyramidinfer", "random",
)  # fmt: skip
BATCH_TOKENS = 8192


def mean_score(
    model: PreTrainedModel,
    tokenizer: Any,
    policy: CachePolicy,
    asked: Sequence[WordPrompt],
    *,
    later: bool,
) -> float:
    """Return the mean fraction of expected words, for prompts of one kind and length."""
    scores = []
    size = max(1, BATCH_TOKENS // len(asked[0].input.split()))
    for start in range(0, len(asked), size):
        batch = asked[start : start + size]
        documents, questions = (
            torch.tensor(tokenizer([getattr(each, part) for each in batch]).input_ids)
            for part in ("document", "question")
        )
        most = max(prompt.max_new_tokens for prompt in batch)
        generated = continuations(model, policy, documents, questions, most, later=later)
        for prompt, tokens in zip(batch, generated, strict=True):
            scores.append(word_score(tokenizer, tokens, prompt.outputs))
    return fmean(scores)


def measure(
    model: PreTrainedModel, tokenizer: Any, variant: Variant, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Return a method's scores by mode and kind, as plain data."""
    scores: dict[str, dict[str, float]] = {}
    for mode in arguments.modes:
        scores[mode] = {}
        for kind in arguments.kinds:
            asked = prompts(kind, arguments.length, arguments.count, arguments.seed)
            scores[mode][kind] = round(
                mean_score(model, tokenizer, variant.policy, asked, later=mode == "later"), 4
            )
    return {
        "policy": variant.name,
        "retention_rate": variant.retention_rate,
        "parameters": dict(variant.parameters),
        "length": arguments.length,
        "count": arguments.count,
        "scores": scores,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the methods that the file lacks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--rates", nargs="+", type=float, default=RATES)
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    parser.add_argument("--modes", nargs="+", default=MODES)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    model = LlamaForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(options.model)
    head = {"environment": environment(model.device), "seed": options.seed}
    ledger = Ledger(options.out, head, ("policy", "retention_rate", "length"))
    for variant in variants(options.methods, options.rates):
        if not ledger.lacks(variant.name, variant.retention_rate, options.length):
            continue
        row = measure(model, tokenizer, variant, options)
        ledger.add(row)
        for mode, scores in row["scores"].items():
            said = " ".join(f"{kind} {100 * value:.0f}" for kind, value in scores.items())
            mean = 100 * fmean(scores.values())
            print(f"{variant.label:20} {mode:5} {mean:5.1f}  {said}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
