"""Measure policies on one model: their answers, the bytes they hold, and their compute.

Run as ``python -m benchmarks.front.measure --out F``. ``--task needle`` asks one-hop and two-hop
questions of a needle model, ``--task words`` six kinds of a model of word tasks. ``with`` reads
document and question together; ``later`` lets the policy choose before it knows the question. Rows
that the file already has are not measured again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import attrs
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.answers import MODES, continuations, word_score
from benchmarks.front.compositions import Composition, composed, compositions, method
from benchmarks.harness import Ledger
from kvpolicy import CachePolicy, registered
from kvpolicy.evaluation.results import environment
from kvpolicy.evaluation.tasks import needle, ruler_words
from kvpolicy.integrations.transformers import PolicyCache

RATES = (0.01, 0.02, 0.05, 0.1)
KINDS = {
    "needle": ("one-hop", "two-hop"),
    "words": tuple(kind for kind in ruler_words.KINDS if kind != "single"),
}


@attrs.frozen
class Asked:
    """Questions of one kind and one length, with their documents.

    Args:
        documents: ``[count, document_len]`` token ids.
        questions: ``[count, question_len]``.
        new_tokens: Tokens to generate.
        score: Returns the score, from 0 to 1, of a row and its generated tokens.
    """

    documents: Tensor
    questions: Tensor
    new_tokens: int
    score: Callable[[int, list[int]], float]


@attrs.frozen
class Point:
    """The results of one policy on questions of one kind.

    Args:
        scores: Score of each prompt, from 0 to 1.
        held: Bytes of keys and values after the policy chose, over those of all.
        work: Layer-tokens computed in prefill, over those of full context.
    """

    scores: list[float]
    held: float
    work: float


def needle_questions(kind: str, length: int, count: int, seed: int) -> Asked:
    """Return needle questions; the last two tokens of each prompt are the question."""
    task = needle.NeedleTask(context_len=length, hops=1 + (kind == "two-hop"))
    prompts = task.prompts(count, seed)
    ids = torch.tensor([prompt.input_ids for prompt in prompts])

    def score(row: int, tokens: list[int]) -> float:
        return float(needle.exact_match(tokens, prompts[row].answer))

    return Asked(ids[:, :-2], ids[:, -2:], len(prompts[0].answer), score)


def word_questions(tokenizer: Any, kind: str, length: int, count: int, seed: int) -> Asked:
    """Return questions of the word tasks, scored by the fraction of expected words found."""
    prompts = ruler_words.prompts(kind, length, count, seed)

    def ids(part: str) -> Tensor:
        return torch.tensor(tokenizer([getattr(each, part) for each in prompts]).input_ids)

    def score(row: int, tokens: list[int]) -> float:
        return word_score(tokenizer, tokens, prompts[row].outputs)

    most = max(prompt.max_new_tokens for prompt in prompts)
    return Asked(ids("document"), ids("question"), most, score)


def measure(
    model: PreTrainedModel, policy: CachePolicy, asked: Asked, *, later: bool, batch: int
) -> Point:
    """Answer all questions under a policy.

    Args:
        model: In evaluation mode.
        policy: What to keep, chosen once.
        asked: The questions.
        later: Whether the questions are read after the policy has chosen.
        batch: Prompts at a time.
    """
    scores, held, work = list[float](), list[float](), list[float]()

    def chosen(cache: PolicyCache, first: Tensor) -> None:
        total = cache.report().total
        held.append(total.held_bytes / total.full_bytes)
        work.append(work_of(policy, cache, first))

    for start in range(0, len(asked.documents), batch):
        rows = slice(start, start + batch)
        documents, questions = (
            each[rows].to(model.device) for each in (asked.documents, asked.questions)
        )
        found = continuations(
            model, policy, documents, questions, asked.new_tokens, later=later, chosen=chosen
        )
        for row, generated in enumerate(found.tolist(), start):
            scores.append(asked.score(row, generated))
    return Point(scores, fmean(held), fmean(work))


def work_of(policy: CachePolicy, cache: PolicyCache, prompt: Tensor) -> float:
    """Return the layer-tokens computed, divided by those of full context."""
    layers, (batch, length) = len(cache.layers), prompt.shape
    if not policy.propagation.decides_by_content:
        return policy.prefill_compute_rate(layers, length)
    computed, reaching = 0, batch * length
    for layer in range(layers):
        computed += reaching
        if layer in cache.propagated:
            reaching = int((cache.propagated[layer] >= 0).sum())
    return computed / (layers * batch * length)


def chosen(names: Sequence[str] | None) -> list[Composition]:
    """Return the compositions to measure: all, or the named ones."""
    if names is None:
        return list(compositions(frozenset(registered("policy"))))
    return [composed(*name.split("/")) if "/" in name else method(name) for name in names]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the compositions that the file lacks."""
    options = options_of(arguments)
    torch.set_num_threads(options.threads)
    module = needle if options.task == "needle" else ruler_words
    path = options.model or module.MODEL_DIR
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval().to(options.device)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    head = {
        "model": options.name or options.task,
        "task": options.task,
        "length": options.length,
        "count": options.count,
        **environment(model.device),
    }
    ledger = Ledger(options.out, head, ("name", "rate", "mode", "seed"))
    asked: dict[tuple[str, int], Asked] = {}
    for seed in options.seeds:
        for kind in options.kinds or KINDS[options.task]:
            how = (kind, options.length, options.count, seed)
            asked[kind, seed] = (
                needle_questions(*how)
                if options.task == "needle"
                else word_questions(tokenizer, *how)
            )
    for composition in chosen(options.names):
        before: CachePolicy | None = None
        for rate in options.rates:
            policy = composition.at(rate)
            policy, before = None if policy == before else policy, policy  # some take no rate
            for mode in options.modes:
                for seed in options.seeds:
                    place = (composition.name, rate, mode, seed)
                    if policy is None or not ledger.lacks(*place):
                        continue
                    points = {
                        kind: measure(
                            model, policy, each, later=mode == "later", batch=options.batch
                        )
                        for (kind, of), each in asked.items()
                        if of == seed
                    }
                    row = dict(zip(ledger.places, place, strict=True))
                    ledger.add(row | row_of(points, options.each))
        print(composition.name, file=sys.stderr, flush=True)


def row_of(points: dict[str, Point], each: bool) -> dict[str, Any]:
    """Return one policy's numbers as plain data."""
    row: dict[str, Any] = {
        "scores": {kind: round(fmean(point.scores), 4) for kind, point in points.items()},
        "held": round(fmean(point.held for point in points.values()), 5),
        "work": round(fmean(point.work for point in points.values()), 5),
    }
    if each:
        row["each"] = {
            kind: " ".join(str(round(100 * score)) for score in point.scores)
            for kind, point in points.items()
        }
    return row


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=KINDS, default="needle")
    parser.add_argument("--model", type=Path, help="a folder; default the task's bundled model")
    parser.add_argument("--name", help="the model's, in the file")
    parser.add_argument("--names", nargs="+", help="compositions; default all")
    parser.add_argument("--rates", nargs="+", type=float, default=RATES)
    parser.add_argument("--kinds", nargs="+")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[11])
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--each", action="store_true", help="with every prompt's score")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
