"""Measure answers to prompts that another model has made shorter.

Run as ``python -m benchmarks.compress --chooser DIR``. The bundled model of word tasks answers; the
model that chooses is one of the same language with other weights, such as ``python -m
benchmarks.ruler_words.train --seed 11 --minutes 18 --out DIR`` leaves in ``DIR/weights``. Answers
to the whole prompt, to the middle cut out, and to chunks at random stand beside it, all as text.
``python -m benchmarks.compress --table`` prints the tables of the results.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import attrs
import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.ruler_words.measure import continuations
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
from kvpolicy.evaluation.tasks.ruler_words import WordPrompt, prompts, score
from kvpolicy.policies import FullContext, SnapKV, WindowMaxPoolScorer

RESULTS = Path(__file__).resolve().parent / "results" / "compress.json"
RATES = (0.1, 0.2, 0.4)
CHUNK_SIZE = 16
# Those that are looked up in a document; the others count words, which every sample does.
KINDS_ASKED = ("multi-key", "two-hop", "tracing", "multi-query")


@attrs.frozen
class RandomScorer(PromptScorer):
    """The control: chunks at random."""

    seed: int = 0

    def score(self, model: PreTrainedModel, input_ids: Sequence[int] | Tensor) -> PromptSaliency:
        """See `PromptScorer.score`; the same tokens get the same."""
        rng = random.Random(f"{self.seed}/{list(input_ids)}")
        return PromptSaliency(torch.tensor([rng.random() for _ in input_ids]), "chance")


@attrs.frozen
class Way:
    """A way to choose chunks."""

    scorer: PromptScorer
    align: str = "line"
    by_answerer: bool = False


WAYS = {
    "look-ahead": Way(LookAheadScorer()),
    "look-ahead, chunks end at words": Way(LookAheadScorer(), "word"),
    "look-ahead, not pooled": Way(LookAheadScorer(kernel_size=1)),
    "last query's products, layer 2": Way(FilterLayerScorer(filter_layer=2)),
    "last 8 queries' attention, layer 1": Way(FilterLayerScorer(WindowMaxPoolScorer(), 1)),
    "chunks at random": Way(RandomScorer()),
    "look-ahead of the answerer itself": Way(LookAheadScorer(), by_answerer=True),
}


def in_lines(text: str) -> str:
    """A line for each sentence, which is the same to models of words."""
    return text.replace(" . ", " .\n")


def middle_cut(text: str, question: str, rate: float) -> str:
    """The first and the last words of a text, half of the rate each, and the question."""
    words, asked = text.split(), len(question.split())
    count = max(round(rate * len(words)), asked)
    tail = max(count // 2, asked)
    return " ".join([*words[: count - tail], *words[len(words) - tail :]])


def answered(answerer: Any, policy: CachePolicy, text: str, prompt: WordPrompt) -> float:
    """The part of an answer's words that a model finds, given a text that ends in the question."""
    tokenizer = answerer.tokenizer
    document, question = (
        torch.tensor([tokenizer(part).input_ids])
        for part in (text.removesuffix(prompt.question), prompt.question)
    )
    generated = continuations(
        answerer.model, policy, document, question, prompt.max_new_tokens, later=False
    )
    said, _, _ = tokenizer.decode(generated[0]).partition(tokenizer.eos_token)
    return score(said, prompt.outputs)


def measure(
    answerer: Any, asked: Sequence[WordPrompt], shorten: Callable[[WordPrompt], str]
) -> dict[str, float]:
    """Mean score, and mean length in words, of prompts made shorter."""
    texts = [shorten(prompt) for prompt in asked]
    scores = [
        answered(answerer, FullContext(), text, prompt)
        for text, prompt in zip(texts, asked, strict=True)
    ]
    share = fmean(
        len(text.split()) / len(prompt.input.split())
        for text, prompt in zip(texts, asked, strict=True)
    )
    return {"score": round(fmean(scores), 4), "length": round(share, 4)}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Every way to shorten, at every rate, on every kind of question."""
    chooser, answerer = load(str(options.chooser)), load("ruler_words")
    data: dict[str, Any] = {
        "environment": environment(answerer.model.device),
        "settings": {
            "length": options.length,
            "count": options.count,
            "chunk_size": CHUNK_SIZE,
            "seed": options.seed,
            "chooser": options.chooser_is,
            "answerer": "ruler_words",
        },
        "rows": [],
    }
    for kind in options.kinds:
        asked = prompts(kind, options.length, options.count, options.seed)
        begin = time.perf_counter()

        def note(way: str, rate: float | None, found: dict[str, float], kind: str = kind) -> None:
            data["rows"].append({"kind": kind, "way": way, "rate": rate, **found})
            print(f"{kind:12} {way:36} {rate or 1:4} {found}", file=sys.stderr, flush=True)

        note("whole, the answerer", None, measure(answerer, asked, lambda each: each.input))
        note("whole, the chooser", None, measure(chooser, asked, lambda each: each.input))
        for rate in options.rates:
            policy = SnapKV(retention_rate=rate)
            scores = [answered(answerer, policy, each.input, each) for each in asked]
            note("SnapKV in the answerer", rate, {"score": round(fmean(scores), 4), "length": 1.0})
            note(
                "middle cut out",
                rate,
                measure(
                    answerer,
                    asked,
                    lambda each, rate=rate: middle_cut(each.input, each.question, rate),  # type: ignore[misc]
                ),
            )
            for name, way in WAYS.items():

                def shorten(each: WordPrompt, rate: float = rate, way: Way = way) -> str:
                    choosing = answerer if way.by_answerer else chooser
                    found = compress_prompt(
                        choosing.model,
                        choosing.tokenizer,
                        in_lines(each.input),
                        rate=rate,
                        scorer=way.scorer,
                        chunk_size=CHUNK_SIZE,
                        align=way.align,
                        keep=[each.question],
                    )
                    return found.text

                note(name, rate, measure(answerer, asked, shorten))
        print(f"{kind}: {time.perf_counter() - begin:.0f} s", file=sys.stderr)
        options.out.write_text(json.dumps(data, indent=1) + "\n")
    return data


def table(data: dict[str, Any]) -> str:
    """A row for each way; for each rate the mean over the kinds, then the kinds."""
    rows = data["rows"]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    rates = [rate for rate in dict.fromkeys(row["rate"] for row in rows) if rate is not None]
    lines = ["| way | " + " | ".join(f"{rate:.0%}" for rate in rates) + " |"]
    lines.append("|---|" + "---|" * len(rates))
    for way in dict.fromkeys(row["way"] for row in rows):
        cells = []
        for rate in rates:
            found = {
                row["kind"]: row
                for row in rows
                if row["way"] == way and row["rate"] in (rate, None)
            }
            scores = [100 * found[kind]["score"] for kind in kinds]
            cells.append(f"**{fmean(scores):.0f}** · {' '.join(f'{each:.0f}' for each in scores)}")
        lines.append(f"| {way} | " + " | ".join(cells) + " |")
    return re.sub(r"\| $", "|", "\n".join(lines))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chooser", type=Path, help="folder of the model that chooses")
    parser.add_argument("--chooser-is", default="", help="what the chooser is, for the results")
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
