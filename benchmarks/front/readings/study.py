"""Measure rules that choose what a document keeps before the question is known.

Run as ``python -m benchmarks.front.readings --task needle --out F.json``. Rules that the study
computes itself are named as in `benchmarks.front.readings.rules`; methods of the library, as
``kvzip``, by their own names. Rows that the file already has are not measured again. ``--times``
measures what a choice costs on the CPU instead, and adds it to the file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.front.compositions import Composition, method
from benchmarks.front.measure import Point, measure, row_of
from benchmarks.front.readings.given import given, selector
from benchmarks.front.readings.questions import KINDS, LENGTHS, MODULES, Questions, questions
from benchmarks.front.readings.reading import Reading, read
from benchmarks.front.readings.rules import BASES, FACTORS, Rule, Saliency
from benchmarks.front.readings.second_reading import oracle
from benchmarks.harness import Ledger
from kvpolicy import CachePolicy
from kvpolicy.evaluation.results import environment
from kvpolicy.policies import ExpectedAttentionScorer, KVzip, PassAllPropagation

RATES = {"needle": (0.02, 0.03, 0.05, 0.2), "words": (0.05, 0.1, 0.2), "long": (0.2, 0.4, 0.6)}


def _short_chunks(rate: float) -> CachePolicy:
    return KVzip(rate, chunk_size=256)


def _expected(rate: float) -> CachePolicy:
    return CachePolicy(ExpectedAttentionScorer(), selector("global", rate), PassAllPropagation())


# Methods of the library with their defaults, and two with other settings.
METHODS = (
    "full_context", "kvzip", "curdkv", "expected_attention", "compactor", "keydiff", "h2o",
    "fastkv", "snapkv",
)  # fmt: skip
LIBRARY = {
    **{name: method(name) for name in METHODS},
    "kvzip-chunks256": Composition("kvzip-chunks256", _short_chunks),
    "expected_attention-global": Composition("expected_attention-global", _expected),
}
RULES = (
    "fixed*values", "fixed", "fixed+std", "fixed+mean", "fixed*values+std", "fixed*values+mean",
    "fixed+layer", "fixed*values+layer", "fixed*outputs", "fixed/equal", "fixed*values/equal",
    "oracle", "own-peaks", "own-peaks*values", "own-peaks+std", "own-sums", "own-sums+mean",
    "own-unmasked*values", "shifted", "shifted*values", "shifted+std", "shifted+mean",
    "fixed-every2*values", "fixed-every4*values", "fixed-sums*values", "fixed-min*values",
    "fixed-group-mean*values", "fixed-chunks*values", "fixed-from1*values", "fixed-from2*values",
    "fixed-from3*values", "surprise/equal", "fixed*surprise", "fixed&keydiff", "fixed|keydiff",
    "fixed*leverage", "fixed&leverage", "fixed|leverage", "again", "again*values", "again+std",
    "again+mean", "again-every2", "again-every2*values", "again-cut2-half*values",
    "again-cut2-quarter*values", "again-to1-fixed*values", "again-to2-fixed*values",
    "again-to3-fixed*values", "again-to1-shifted*values", "again-to2-shifted*values",
    "again-to3-shifted*values", "again-to2-shifted+mean", "again-from3*values",
    "again-from4*values", "again-from5*values",
)  # fmt: skip


class Study:
    """The questions of one seed, and the saliencies that were computed for them.

    Args:
        model: In evaluation mode.
        asked: The questions of each kind.
        batch: Documents at a time.
    """

    def __init__(
        self, model: LlamaForCausalLM, asked: dict[str, Questions], batch: int = 16
    ) -> None:
        self._model, self._asked, self._batch = model, asked, batch
        self._found: dict[tuple[str, str], list[Saliency]] = {}

    def points(self, name: str, rate: float) -> dict[str, Point]:
        """Measure a rule or a method at a rate; return one point for each kind of question."""
        return {kind: self._point(name, rate, kind) for kind in self._asked}

    def _point(self, name: str, rate: float, kind: str) -> Point:
        whole = self._asked[kind].asked
        if name in LIBRARY:
            policy = LIBRARY[name].at(rate)
            assert policy is not None
            return measure(self._model, policy, whole, later=True, batch=self._batch)
        rule, found = Rule.named(name), []
        bases = self._saliencies(rule.base, kind)
        factors = self._saliencies(rule.factor, kind) if rule.factor else [None] * len(bases)
        for number, (base, factor) in enumerate(zip(bases, factors, strict=True)):
            policy = given(rule.joined(base, factor), rule.selector, rate)
            block = self._block(kind, number).asked
            found.append(measure(self._model, policy, block, later=True, batch=self._batch))
        scores = [score for point in found for score in point.scores]
        tokens = BASES[rule.base].tokens if rule.base in BASES else 0.0
        return Point(scores, fmean(point.held for point in found), 1 + tokens)

    def _block(self, kind: str, number: int) -> Questions:
        return self._asked[kind].rows(number * self._batch, (number + 1) * self._batch)

    def _saliencies(self, name: str, kind: str) -> list[Saliency]:
        """Return a base's or a factor's saliency of each batch, computed at its first use."""
        if (name, kind) not in self._found:
            count = len(self._asked[kind].asked.documents)
            blocks = [self._block(kind, each) for each in range(-(-count // self._batch))]
            self._found[name, kind] = [
                saliency(name, read(self._model, block.asked.documents), block) for block in blocks
            ]
        return self._found[name, kind]


def saliency(name: str, reading: Reading, block: Questions) -> Saliency:
    """Return the saliency of a base or a factor for the documents of a reading."""
    if name == "oracle":
        return oracle(reading, block.following)
    return (BASES[name].of if name in BASES else FACTORS[name])(reading)


def products(name: str) -> float | None:
    """Return the query-key pairs computed, over those of one causal reading; None if unknown."""
    if name in LIBRARY:
        known = {"kvzip": "again", "h2o": "own-sums"}
        return 1 + BASES[known[name]].products if name in known else None
    base = Rule.named(name).base
    return 1 + BASES[base].products if base in BASES else None


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the rules that the file lacks."""
    options = options_of(arguments)
    torch.set_num_threads(options.threads)
    path = options.model or MODULES[options.task].MODEL_DIR
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    length = options.length or LENGTHS[options.task]
    head = {
        "model": options.name or options.task,
        "task": options.task,
        "length": length,
        "count": options.count,
        **environment(model.device),
    }
    ledger = Ledger(options.out, head, ("name", "rate", "seed"))
    draw = partial(questions, options.task, tokenizer, length=length, count=options.count)
    kinds = options.kinds or KINDS[options.task]
    studies = {
        seed: Study(model, {kind: draw(kind=kind, seed=seed) for kind in kinds}, options.batch)
        for seed in options.seeds
    }
    for name in options.rules:
        for rate in options.rates or RATES[options.task]:
            if name == "full_context" and rate != (options.rates or RATES[options.task])[0]:
                continue
            for seed, study in studies.items():
                if ledger.lacks(name, rate, seed):
                    row = {"name": name, "rate": rate, "seed": seed, "mode": "later"}
                    pairs = products(name)
                    measured = row_of(study.points(name, rate), options.each)
                    ledger.add({**row, **measured, "products": pairs and round(pairs, 3)})
            say(ledger.data["rows"], name, rate)


def say(rows: list[dict[str, Any]], name: str, rate: float) -> None:
    """Print a rule's mean over seeds."""
    found = [row["scores"] for row in rows if (row["name"], row["rate"]) == (name, rate)]
    kinds = {kind: fmean(scores[kind] for scores in found) for kind in found[0]}
    of_kinds = " ".join(f"{kind} {100 * mean:.0f}" for kind, mean in kinds.items())
    mean = 100 * fmean(kinds.values())
    print(f"{name:28} {rate:5g} {mean:5.1f}  {of_kinds}", file=sys.stderr, flush=True)


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", choices=KINDS, default="needle")
    parser.add_argument("--model", type=Path, help="a folder; default the task's bundled model")
    parser.add_argument("--name", help="the model's, in the file")
    parser.add_argument("--rules", nargs="+", default=(*LIBRARY, *RULES))
    parser.add_argument("--rates", nargs="+", type=float, help="default the task's three")
    parser.add_argument("--kinds", nargs="+")
    parser.add_argument("--seeds", nargs="+", type=int, default=[7, 11])
    parser.add_argument("--length", type=int, help="tokens of a prompt; default the task's")
    parser.add_argument("--count", type=int, default=16, help="prompts of each kind and seed")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--each", action="store_true", help="with every prompt's score")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(arguments)
