"""Heads that keep unlike numbers of tokens: the bytes they hold, and what a decoded token takes.

After a prompt a copy of the cache is padded: every head has as many slots as the one that keeps
most. Both decode the same tokens in turns, by the processor's time; ratios are of the same round.
The bytes are also those of the bundled needle model, whose heads do not look at random. Writes
``unequal_heads.json``.

    python benchmarks/unequal_heads.py [--context 8192] [--rounds 21] [--threads 1]
    python benchmarks/unequal_heads.py --quick
    python benchmarks/unequal_heads.py --show FILE
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import attrs
import torch
from torch import Tensor
from transformers import PreTrainedModel

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.common import (
    at_least,
    facts,
    out_folder,
    parser_of,
    random_prompt,
    read_json,
    spread,
    write_json,
)
from benchmarks.methods import SMALL, TINY
from kvpolicy.evaluation.tasks.needle import NeedleTask, load_model
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.state.packed import Packed
from kvpolicy.policies import AdaKV

RATES = (0.02, 0.1, 0.2)
# Tokens that one cache decodes before it is the other's turn.
BLOCK = 16
HEADER = (
    f"{'model':<8}{'tokens':>7}{'rate':>6}{'kept':>7}{'held':>7}{'padded':>8}"
    f"{'padded ms':>10}{'packed ms':>10}{'x (range)':>17}"
)


def read(model: PreTrainedModel, prompt: Tensor, rate: float) -> PolicyCache:
    """A cache after a prompt."""
    cache = PolicyCache(AdaKV(rate))
    with torch.no_grad(), cache.attached(model):
        model(prompt, past_key_values=cache, logits_to_keep=1)
    return cache


def padded(cache: PolicyCache) -> PolicyCache:
    """A copy that holds the same, padded, until its policy acts again."""
    other = copy.deepcopy(cache)
    for layer in other.layers:
        if isinstance(layer.held, Packed):
            layer.held = layer.held.unpacked()
    return other


def shares(cache: PolicyCache) -> dict[str, float]:
    """Of a full cache's bytes: those of the tokens kept, of what is held, and of padded tensors."""
    total, other = cache.report().total, padded(cache)
    return {
        "kept": (total.held_bytes - total.padding_bytes) / total.full_bytes,
        "held": sum(layer.nbytes() for layer in cache.layers) / total.full_bytes,
        "padded": sum(layer.nbytes() for layer in other.layers) / total.full_bytes,
    }


def block_ms(model: PreTrainedModel, cache: PolicyCache) -> float:
    """Processor milliseconds of a decoded token, the mean over a block."""
    token = torch.ones(1, 1, dtype=torch.int64)
    with torch.no_grad(), cache.attached(model):
        start = time.process_time()
        for _ in range(BLOCK):
            model(token, past_key_values=cache)
        return 1e3 * (time.process_time() - start) / BLOCK


def row_of(model: PreTrainedModel, context: int, rate: float, rounds: int) -> dict[str, Any]:
    """One rate of a model with random weights; a round before the first does not count."""
    packed = read(model, random_prompt(model.config.vocab_size, context), rate)
    caches = {"padded": padded(packed), "packed": packed}
    row = {"model": "random", "context": context, "rate": rate, **shares(packed)}
    times: dict[str, list[float]] = {name: [] for name in caches}
    for turn in range(rounds + 1):
        for name in list(caches)[:: 1 if turn % 2 else -1]:
            found = block_ms(model, caches[name])
            if turn:
                times[name].append(found)
    pairs = zip(times["packed"], times["padded"], strict=True)
    return {
        **row,
        "padded_ms": times["padded"],
        "packed_ms": times["packed"],
        "of_padded": spread([one / other for one, other in pairs]),
    }


def needle_row(rate: float) -> dict[str, Any]:
    """One rate of the bundled model, whose prompts have at most 1,024 tokens."""
    (prompt,) = NeedleTask(1024, 1).prompts(1, seed=1)
    cache = read(load_model(), torch.tensor([prompt.input_ids]), rate)
    return {"model": "needle", "context": 1024, "rate": rate, **shares(cache)}


def line_of(row: dict[str, Any]) -> str:
    """One line of the table, at most 80 columns."""
    start = (
        f"{row['model']:<8}{row['context']:>7}{row['rate']:>6}"
        f"{row['kept']:>7.1%}{row['held']:>7.1%}{row['padded']:>8.1%}"
    )
    if "of_padded" not in row:
        return start
    middle, lowest, highest = (f"{each:.2f}" for each in row["of_padded"].values())
    extent = f"{middle} ({lowest}-{highest})"
    return f"{start}{median(row['padded_ms']):>10.2f}{median(row['packed_ms']):>10.2f}{extent:>17}"


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--context", type=at_least(64), help="default 8192")
    parser.add_argument("--rounds", type=at_least(1), help="default 21")
    options = parser.parse_args(arguments)
    options.context = options.context or (64 if options.quick else 8192)
    options.rounds = options.rounds or (1 if options.quick else 21)
    return options


def measure(options: argparse.Namespace, folder: Path) -> None:
    """Measure everything; the result is written after every row."""
    spec = TINY if options.quick else SMALL
    model = spec.build()
    settings = {"model": attrs.asdict(spec), "rounds": options.rounds, "block": BLOCK}
    record: dict[str, Any] = {
        "benchmark": "unequal_heads",
        "settings": settings,
        **facts(model.device),
        "rows": [],
    }
    print(HEADER, flush=True)
    for name in ("needle", "random"):
        for rate in RATES:
            row = (
                needle_row(rate)
                if name == "needle"
                else row_of(model, options.context, rate, options.rounds)
            )
            print(line_of(row), flush=True)
            record["rows"].append(row)
            write_json(folder, "unequal_heads.json", record)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    options = options_of(arguments)
    folder = out_folder(options)
    torch.set_num_threads(options.threads)
    if options.show is None:
        measure(options, folder)
    else:
        print("\n".join([HEADER, *map(line_of, read_json(options.show)["rows"])]))


if __name__ == "__main__":
    main()
