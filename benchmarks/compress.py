"""Measure a model's answers to prompts that another model has shortened.

Run as ``python -m benchmarks.compress --chooser DIR``. The bundled model of word tasks answers; the
model that chooses is one of the same language with other weights, such as ``python -m
training.ruler_words.train --seed 11 --minutes 18 --out DIR`` leaves in ``DIR/weights``. For
comparison, it also answers the whole prompt, the prompt with its middle cut out, and one of random
chunks, all as text.
``python -m benchmarks.compress --table`` prints the tables of the results.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import attrs
import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.answers import continuations, word_score
from benchmarks.harness import RESULTS as FOLDER
from benchmarks.harness import Ledger
from kvpolicy import CachePolicy
from kvpolicy.evaluation import (
    FilterLayerScorer,
    LookAheadScorer,
    PromptSaliency,
    PromptScorer,
    compress_prompt,
    load,
)
from kvpolicy.evaluation.results import environment
from kvpolicy.evaluation.tasks.ruler_words import WordPrompt, prompts
from kvpolicy.policies import FullContext, SnapKV, WindowMaxPoolScorer

RESULTS = FOLDER / "compress.json"
RATES = (0.1, 0.2, 0.4)
CHUNK_SIZE = 16
# Kinds whose answer is looked up in a document; the others count words, as any sample can do.
KINDS_ASKED = ("multi-key", "two-hop")


@attrs.frozen
class RandomScorer(PromptScorer):
    """A scorer that gives random saliency: the control."""

    seed: int = 0

    def score(self, model: PreTrainedModel, input_ids: Sequence[int] | Tensor) -> PromptSaliency:
        """Return random saliency, the same for the same tokens; see `PromptScorer.score`."""
        rng = random.Random(f"{self.seed}/{list(input_ids)}")
        return PromptSaliency(torch.tensor([rng.random() for _ in input_ids]), "chance")


@attrs.frozen
class Way:
    """A way to choose chunks: a scorer, the kind of chunk, and the model that scores."""

    scorer: PromptScorer
    align: str = "line"
    chooses: str = "chooser"  # or the answerer itself, or nobody


WAYS = {
    "look-ahead": Way(LookAheadScorer()),
    "look-ahead, chunks end at words": Way(LookAheadScorer(), "word"),
    "last query's products, layer 2": Way(FilterLayerScorer(filter_layer=2)),
    "last 8 queries' attention, layer 1": Way(FilterLayerScorer(WindowMaxPoolScorer(), 1)),
    "chunks at random": Way(RandomScorer(), chooses="nobody"),
    "look-ahead of the answerer itself": Way(LookAheadScorer(), chooses="answerer"),
}


def in_lines(text: str) -> str:
    """Put each sentence on its own line, which does not change the words."""
    return text.replace(" . ", " .\n")


def whole(prompt: WordPrompt) -> str:
    """Return the whole prompt, unshortened."""
    return prompt.input


def middle_cut(prompt: WordPrompt, rate: float) -> str:
    """Cut the middle out: return a prompt's first and last words, and at least its question."""
    words, asked = prompt.input.split(), len(prompt.question.split())
    count = max(round(rate * len(words)), asked)
    tail = max(count // 2, asked)
    return " ".join([*words[: count - tail], *words[len(words) - tail :]])


def answered(answerer: Any, policy: CachePolicy, text: str, prompt: WordPrompt) -> float:
    """Return the fraction of expected words in a model's answer to a text."""
    tokenizer = answerer.tokenizer
    document, question = (
        torch.tensor([tokenizer(part).input_ids])
        for part in (text.removesuffix(prompt.question), prompt.question)
    )
    generated = continuations(
        answerer.model, policy, document, question, prompt.max_new_tokens, later=False
    )
    return word_score(tokenizer, generated[0], prompt.outputs)


def measure(
    answerer: Any,
    asked: Sequence[WordPrompt],
    shorten: Callable[[WordPrompt], str],
    policy: CachePolicy | None = None,
) -> dict[str, float]:
    """Return the mean score and the mean length of shortened prompts, under a policy."""
    texts = [shorten(prompt) for prompt in asked]
    scores = [
        answered(answerer, policy or FullContext(), text, prompt)
        for text, prompt in zip(texts, asked, strict=True)
    ]
    share = fmean(
        len(text.split()) / len(prompt.input.split())
        for text, prompt in zip(texts, asked, strict=True)
    )
    return {"score": round(fmean(scores), 4), "length": round(share, 4)}


def shortened(choosing: Any, way: Way, rate: float) -> Callable[[WordPrompt], str]:
    """Return a function that shortens a prompt to a rate but keeps its question."""

    def shorten(prompt: WordPrompt) -> str:
        return compress_prompt(
            choosing.model,
            choosing.tokenizer,
            in_lines(prompt.input),
            rate=rate,
            scorer=way.scorer,
            chunk_size=CHUNK_SIZE,
            align=way.align,
            keep=[prompt.question],
        ).text

    return shorten


PLACES = ("kind", "way", "rate", "chooser")


def run(options: argparse.Namespace) -> None:
    """Measure every way to shorten, rate and kind of question that the file lacks."""
    chooser, answerer = load(str(options.chooser)), load("ruler_words")
    head = {
        "environment": environment(answerer.model.device),
        "settings": {
            "length": options.length,
            "count": options.count,
            "chunk_size": CHUNK_SIZE,
            "seed": options.seed,
            "answerer": "ruler_words",
        },
    }
    ledger = Ledger(options.out, head, PLACES)
    for kind in options.kinds:
        asked = prompts(kind, options.length, options.count, options.seed)
        for way, rate, own, measured in cases(chooser, answerer, asked, options.rates):
            place = (kind, way, rate, options.chooser_is if own else None)
            if ledger.lacks(*place):
                ledger.add({**dict(zip(PLACES, place, strict=True)), **measured()})
                print(*ledger.data["rows"][-1].values(), sep="  ", file=sys.stderr, flush=True)


def cases(
    chooser: Any, answerer: Any, asked: Sequence[WordPrompt], rates: Sequence[float]
) -> Iterator[tuple[str, float | None, bool, Callable[[], dict[str, float]]]]:
    """Yield every way to shorten and rate with a function that measures it."""
    yield "whole", None, False, partial(measure, answerer, asked, whole)
    yield "whole, asked of the chooser", None, True, partial(measure, chooser, asked, whole)
    for rate in rates:
        kept, cut = SnapKV(retention_rate=rate), partial(middle_cut, rate=rate)
        yield "SnapKV", rate, False, partial(measure, answerer, asked, whole, kept)
        yield "middle cut out", rate, False, partial(measure, answerer, asked, cut)
        for name, way in WAYS.items():
            shorten = shortened(answerer if way.chooses == "answerer" else chooser, way, rate)
            own = way.chooses == "chooser"
            yield name, rate, own, partial(measure, answerer, asked, shorten)


def table(data: dict[str, Any]) -> str:
    """Return a Markdown table: a row per way and chooser, a column per rate with mean and kinds."""
    rows = data["rows"]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    rates = list(dict.fromkeys(row["rate"] for row in rows if row["rate"] is not None))
    lines = [
        "| way | chooser | " + " | ".join(f"{rate:.0%}" for rate in rates) + " |",
        "|---|---|" + "---|" * len(rates),
    ]
    for way, chooser in dict.fromkeys((row["way"], row["chooser"]) for row in rows):
        cells = []
        for rate in rates:
            found = {
                row["kind"]: 100 * row["score"]
                for row in rows
                if (row["way"], row["chooser"]) == (way, chooser) and row["rate"] in (rate, None)
            }
            each = [f"{found[kind]:.0f}" if kind in found else "?" for kind in kinds]
            cells.append(f"**{fmean(found.values()):.0f}** · {' '.join(each)}")
        lines.append(f"| {way} | {chooser or '-'} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure (unless only the table is asked for), and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chooser", type=Path, help="folder of the model that chooses")
    parser.add_argument("--chooser-is", default="chooser", help="what to call it in the results")
    parser.add_argument("--kinds", nargs="+", default=KINDS_ASKED)
    parser.add_argument("--rates", nargs="+", type=float, default=RATES)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args(arguments)
    if not options.table:
        if options.chooser is None:
            parser.error("--chooser must be given")
        run(options)
    print(table(json.loads(options.out.read_text())))


if __name__ == "__main__":
    main()
