"""Measure what choosing costs on the CPU, beside reading a document with full context.

Run as ``python -m benchmarks.front.readings.times --out F.json``. In every round all rules take
turns. A rule's time is that of its saliency, from the queries, keys and values that the reading has
computed, and of selecting and storing what is kept: the difference between a prefill under its
policy and under full context. A method of the library takes only that difference. All in CPU
seconds of one thread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import LlamaForCausalLM

from benchmarks.common import write_json
from benchmarks.front.readings.given import given
from benchmarks.front.readings.questions import questions
from benchmarks.front.readings.reading import read
from benchmarks.front.readings.rules import Rule
from benchmarks.front.readings.study import LIBRARY, saliency
from benchmarks.harness import in_turns
from kvpolicy import CachePolicy
from kvpolicy.evaluation.results import environment
from kvpolicy.evaluation.tasks import needle
from kvpolicy.integrations.transformers import PolicyCache

RATE = 0.1
NAMES = (
    "kvzip", "kvzip-chunks256", "curdkv", "expected_attention", "compactor", "keydiff", "h2o",
    "fastkv", "snapkv", "fixed*values", "fixed", "fixed+std", "fixed-every2*values",
    "fixed-every4*values", "fixed-chunks*values", "shifted*values", "again-every2*values",
    "again-cut2-quarter*values", "again-to2-fixed*values", "again-from4*values",
)  # fmt: skip


def seconds(work: Callable[[], Any]) -> float:
    """Return the CPU seconds that a piece of work takes."""
    start = time.process_time()
    work()
    return time.process_time() - start


@torch.no_grad()
def contenders(
    model: LlamaForCausalLM, names: Sequence[str], length: int
) -> dict[str, Callable[[], float]]:
    """Return a function for every name that takes the choice's CPU seconds, prefill included.

    ``full_context`` is the prefill alone.
    """
    block = questions("needle", None, "one-hop", length, 1, 3)
    ids = block.asked.documents
    reading = read(model, ids)

    def prefill(policy: CachePolicy | None) -> float:
        assert policy is not None
        cache = PolicyCache(policy)
        with cache.attached(model), torch.no_grad():
            return seconds(lambda: model(ids, cache=cache, logits_to_keep=1))

    def chosen(name: str) -> float:
        if name in LIBRARY:
            return prefill(LIBRARY[name].at(RATE))
        rule, start = Rule.named(name), time.process_time()
        parts = [each and saliency(each, reading, block) for each in (rule.base, rule.factor)]
        found = rule.joined(*parts)  # type: ignore[arg-type]
        scored = time.process_time() - start
        return scored + prefill(given(found, rule.selector, RATE))

    return {name: lambda name=name: chosen(name) for name in ("full_context", *names)}  # type: ignore[misc]


def _between(ones: Sequence[float], others: Sequence[float]) -> float:
    """Return the median difference of two rounds' times."""
    return median(one - other for one, other in zip(ones, others, strict=True))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rules", nargs="+", default=NAMES)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model = needle.load_model()
    taken = in_turns(contenders(model, options.rules, options.length), options.rounds)
    full = median(taken["full_context"])
    rows = [
        {"name": name, "choice_s": round(_between(of, taken["full_context"]), 4)}
        for name, of in taken.items()
        if name != "full_context"
    ]
    settings = {"length": options.length, "rounds": options.rounds, "rate": RATE}
    data = {**settings, **environment(model.device), "prefill_s": round(full, 4), "rows": rows}
    write_json(options.out.resolve().parent, options.out.name, data)
    for row in rows:
        print(f"{row['name']:28} {row['choice_s']:.3f} s, {row['choice_s'] / full:.2f} prefills")


if __name__ == "__main__":
    main()
