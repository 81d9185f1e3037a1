"""Measure two turns about one document: one question ends the prompt, the other comes later.

Run as ``python -m benchmarks.front.chat --out F``. Both are one-hop needle questions, about two
pairs of the document. The policy chooses in both turns: in the second one among what the first
has kept.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.front.compositions import method
from benchmarks.harness import Ledger
from kvpolicy import CachePolicy
from kvpolicy.evaluation.results import environment
from kvpolicy.evaluation.tasks import needle
from kvpolicy.evaluation.tasks.needle.task import NUM_VALUES
from kvpolicy.evaluation.tasks.needle.vocabulary import KEY, QUERY
from kvpolicy.integrations.transformers import PolicyCache

NAMES = ("full_context", "snapkv", "fastkv", "spirekv", "replaykv", "replaykv+drop", "kvzip")
RATES = (0.05, 0.1, 0.2, 0.5)


def other_question(document: Sequence[int], asked: int) -> tuple[list[int], tuple[int, ...]]:
    """Return a question about the first pair that is not the asked one, and its answer."""
    places = [at for at, token in enumerate(document) if token == KEY]
    place = next(at for at in places if document[at + 1] != asked)
    return [QUERY, document[place + 1]], tuple(document[place + 2 : place + 2 + NUM_VALUES])


@torch.no_grad()
def answered(
    model: PreTrainedModel, cache: PolicyCache, ids: Tensor, count: int
) -> list[list[int]]:
    """Read one turn's tokens, and return the next ``count`` greedy ones of each row."""
    cache.start_turn()
    with cache.attached(model):
        logits = model(ids, cache=cache, logits_to_keep=1).logits
        tokens = [logits[:, -1:].argmax(dim=-1)]
        while len(tokens) < count:
            logits = model(tokens[-1], cache=cache).logits
            tokens.append(logits[:, -1:].argmax(dim=-1))
        model(tokens[-1], cache=cache)  # so that the cache holds the whole answer
    return torch.cat(tokens, dim=1).tolist()


def measure(
    model: PreTrainedModel, policy: CachePolicy, prompts: Sequence[needle.NeedlePrompt], batch: int
) -> tuple[list[int], list[int]]:
    """Return 100 or 0 for each prompt's answer in the first turn, and in the second."""
    scores: tuple[list[int], list[int]] = [], []
    for start in range(0, len(prompts), batch):
        rows = prompts[start : start + batch]
        documents = [list(each.input_ids[:-2]) for each in rows]
        firsts = [
            other_question(document, each.input_ids[-1])
            for document, each in zip(documents, rows, strict=True)
        ]
        cache, count = PolicyCache(policy), len(rows[0].answer)
        turns = (
            (
                [[*document, *ids] for document, (ids, _) in zip(documents, firsts, strict=True)],
                [answer for _, answer in firsts],
            ),
            ([list(each.input_ids[-2:]) for each in rows], [each.answer for each in rows]),
        )
        for found, (ids, answers) in zip(scores, turns, strict=True):
            for tokens, answer in zip(
                answered(model, cache, torch.tensor(ids), count), answers, strict=True
            ):
                found.append(100 * needle.exact_match(tokens, answer))
    return scores


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the policies that the file lacks, and print their rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--names", nargs="+", default=NAMES)
    parser.add_argument("--rates", nargs="+", type=float, default=RATES)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=101)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    model = needle.load_model()
    prompts = needle.NeedleTask(options.length, 1).prompts(options.count, options.seed)
    head = {"length": options.length, "count": options.count, "seed": options.seed}
    ledger = Ledger(options.out, head | environment(model.device), ("name", "rate"))
    for name in options.names:
        for rate in options.rates:
            policy = method(name).at(rate)
            if policy is None or not ledger.lacks(name, rate):
                continue
            turns = measure(model, policy, prompts, options.batch)
            each = {str(turn): " ".join(map(str, of)) for turn, of in enumerate(turns, 1)}
            ledger.add(
                {"name": name, "rate": rate, "scores": list(map(fmean, turns)), "each": each}
            )
            print(f"{name:15} {rate:<5} {fmean(turns[0]):5.1f} {fmean(turns[1]):5.1f}", flush=True)
            if name == "full_context":
                break


if __name__ == "__main__":
    main()
