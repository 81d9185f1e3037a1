"""Measure heads that keep different numbers of tokens: bytes held, and time per token.

After a prompt, a copy of the cache is padded: every head gets as many slots as the head that keeps
most. Both caches decode the same tokens in turns, in CPU time; ratios are of the same round. The
bytes are also measured on the bundled needle model, whose attention is trained. Writes
``unequal_heads.json``.

    python benchmarks/unequal_heads.py [--context 8192] [--rounds 21] [--threads 1]
    python benchmarks/unequal_heads.py --quick
    python benchmarks/unequal_heads.py --show FILE
"""

from __future__ import annotations

import copy
import sys
from functools import partial
from pathlib import Path

import attrs
import torch
from torch import Tensor
from transformers import PreTrainedModel

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.clocks import timed
from benchmarks.common import SMALL, TINY, random_prompt, spread
from benchmarks.harness import (
    Benchmark,
    Column,
    Option,
    Row,
    Run,
    Table,
    at_least,
    extent,
    in_turns,
    middle,
    ratios,
)
from kvpolicy.evaluation.tasks.needle import NeedleTask, load_model
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.state.packed import Packed
from kvpolicy.policies import AdaKV

RATES = (0.02, 0.1, 0.2)
# Tokens that one cache decodes before it is the other's turn.
BLOCK = 16
OPTIONS = (Option("context", 8192, at_least(64), quick=64), Option("rounds", 21, quick=1))
_SHARES = (
    Column("model", -8, "model"),
    Column("tokens", 7, "context"),
    Column("rate", 6, "rate"),
    Column("kept", 7, "kept", ".1%"),
    Column("held", 7, "held", ".1%"),
    Column("padded", 8, "padded", ".1%"),
)
TABLE = Table(
    "rows",
    *_SHARES,
    Column("padded ms", 10, middle("padded_ms"), ".2f"),
    Column("packed ms", 10, middle("packed_ms"), ".2f"),
    Column("x (range)", 17, extent("of_padded")),
    # For the bundled model, only the bytes are measured.
    instead=lambda row: None if "of_padded" in row else "".join(c.cell(row) for c in _SHARES),
)


def read(model: PreTrainedModel, prompt: Tensor, rate: float) -> PolicyCache:
    """Read a prompt and return its cache."""
    cache = PolicyCache(AdaKV(rate))
    with torch.no_grad(), cache.attached(model):
        model(prompt, cache=cache, logits_to_keep=1)
    return cache


def padded(cache: PolicyCache) -> PolicyCache:
    """Return a copy of a cache with all heads padded to the same length."""
    other = copy.deepcopy(cache)
    for layer in other.layers:
        if isinstance(layer.held, Packed):
            layer.held = layer.held.unpacked()
    return other


def shares(cache: PolicyCache) -> dict[str, float]:
    """Return a cache's bytes divided by a full cache's: tokens kept, as held, and if padded."""
    total, other = cache.report().total, padded(cache)
    return {
        "kept": (total.held_bytes - total.padding_bytes) / total.full_bytes,
        "held": sum(layer.nbytes() for layer in cache.layers) / total.full_bytes,
        "padded": sum(layer.nbytes() for layer in other.layers) / total.full_bytes,
    }


def block_ms(model: PreTrainedModel, cache: PolicyCache) -> float:
    """Return the milliseconds of a decoded token, averaged over a block of tokens.

    They are the processor's; on a GPU, where the processor waits for it, those on the clock.
    """
    token = torch.ones(1, 1, dtype=torch.int64, device=model.device)

    def block() -> None:
        for _ in range(BLOCK):
            model(token, cache=cache)

    with torch.no_grad(), cache.attached(model):
        _, interval = timed(model.device, block)
    return (interval.wall_ms if model.device.type == "cuda" else interval.cpu_ms) / BLOCK


def row_of(model: PreTrainedModel, context: int, rate: float, rounds: int) -> Row:
    """Return the results at one rate, on a model with random weights."""
    prompt = random_prompt(model.config.vocab_size, context).to(model.device)
    packed = read(model, prompt, rate)
    row = {"model": "random", "context": context, "rate": rate, **shares(packed)}
    caches = {"padded": padded(packed), "packed": packed}
    turns = {name: partial(block_ms, model, cache) for name, cache in caches.items()}
    taken = in_turns(turns, rounds)
    return {
        **row,
        "padded_ms": taken["padded"],
        "packed_ms": taken["packed"],
        "of_padded": spread(ratios(taken["packed"], taken["padded"])),
    }


def needle_row(rate: float) -> Row:
    """Return the results at one rate, on the bundled model with a prompt of 1,024 tokens."""
    (prompt,) = NeedleTask(1024, 1).prompts(1, seed=1)
    cache = read(load_model(), torch.tensor([prompt.input_ids]), rate)
    return {"model": "needle", "context": 1024, "rate": rate, **shares(cache)}


def measure(run: Run) -> None:
    """Measure both models at every rate."""
    options, spec = run.options, TINY if run.options.quick else SMALL
    model = spec.build()
    settings = {"model": attrs.asdict(spec), "rounds": options.rounds, "block": BLOCK}
    run.begin(settings, "rows")
    for rate in RATES:
        run.add("rows", needle_row(rate))
    for rate in RATES:
        run.add("rows", row_of(model, options.context, rate, options.rounds))


BENCHMARK = Benchmark("unequal_heads", __doc__, measure, OPTIONS, (TABLE,))
main = BENCHMARK.main

if __name__ == "__main__":
    main()
