"""Turn after turn on one long document: what a turn takes, and what is held.

Full context and every policy read a document, then take 50 turns of 200 new tokens, one after the
other in every turn, so that a machine that slows down slows down all. A turn is the forward over
its tokens, until the next token is known; the table has the processor's time. Writes
``conversation.json``.

    python benchmarks/conversation.py [--document 50000] [--turns 50] [--new 200] [--threads 2]
        [--shape small|llama-3.1-8b] [--device cpu] [--out DIR]
    python benchmarks/conversation.py --quick
    python benchmarks/conversation.py --show FILE
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.clocks import timed
from benchmarks.common import (
    ModelSpec,
    at_least,
    facts,
    out_folder,
    parser_of,
    random_prompt,
    read_json,
    write_json,
)
from benchmarks.gpu import LLAMA
from benchmarks.real_shape import TINY
from benchmarks.turns import held_bytes
from kvpolicy import CachePolicy
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import FastKV, SnapKV

SMALL = ModelSpec(
    hidden_size=256, num_layers=4, query_heads=8, kv_heads=2, intermediate_size=768, vocab_size=1024
)
SHAPES = {
    "tiny": (TINY, torch.float32),
    "small": (SMALL, torch.float32),
    "llama-3.1-8b": (LLAMA, torch.bfloat16),
}
POLICIES: dict[str, CachePolicy | None] = {
    "full_context": None,
    "snapkv": SnapKV(retention_rate=0.1),
    "fastkv": FastKV(tsp_rate=0.2, retention_rate=0.1),
}
AT_THE_ENDS = 5  # turns of which the first and the last are shown
HEADER = (
    f"{'policy':<14}{'doc. CPU s':>11}{'first turns ms':>16}{'last turns ms':>15}"
    f"{'held MiB':>10}{'then':>9}"
)


def converse(model: PreTrainedModel, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each policy."""
    vocab_size, device = model.config.vocab_size, model.device
    document = random_prompt(vocab_size, options.document).to(device)
    rows, caches = [], []
    with ExitStack() as attached, torch.inference_mode():
        for name, policy in POLICIES.items():
            cache: Any = DynamicCache(config=model.config)
            if policy is not None:
                cache = PolicyCache(policy)
                attached.enter_context(cache.attached(model))
            _, taken = timed(device, lambda cache=cache: _read(model, document, cache))
            caches.append(cache)
            row = {"policy": name, "document_ms": taken.wall_ms, "document_cpu_ms": taken.cpu_ms}
            row |= {"turn_ms": [], "turn_cpu_ms": [], "held_bytes": []}
            row["held_bytes"].append(held_bytes(cache))
            rows.append(row)
        for turn in range(options.turns):
            new = random_prompt(vocab_size, options.new + turn)[:, turn:].to(device)
            for row, cache in zip(rows, caches, strict=True):
                if isinstance(cache, PolicyCache):
                    cache.start_turn()
                _, taken = timed(device, lambda cache=cache, new=new: _read(model, new, cache))
                row["turn_ms"].append(taken.wall_ms)
                row["turn_cpu_ms"].append(taken.cpu_ms)
                row["held_bytes"].append(held_bytes(cache))
    return rows


def _read(model: PreTrainedModel, ids: Tensor, cache: Any) -> Tensor:
    output = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return torch.as_tensor(output.logits[:, -1].argmax(dim=-1))


def line_of(row: dict[str, Any]) -> str:
    """One line of the table, at most 80 columns."""
    turns = row["turn_cpu_ms"]  # another program's work does not count, as it would on the clock
    first, last = turns[:AT_THE_ENDS], turns[-AT_THE_ENDS:]
    before, after = (row["held_bytes"][index] / 2**20 for index in (0, -1))
    return (
        f"{row['policy']:<14}{row['document_cpu_ms'] / 1e3:>11.2f}{median(first):>16.1f}"
        f"{median(last):>15.1f}{before:>10,.1f}{after:>9,.1f}"
    )


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--document", type=at_least(1), help="tokens; default 50000")
    parser.add_argument("--turns", type=at_least(1), help="default 50")
    parser.add_argument("--new", type=at_least(1), help="tokens of a turn; default 200")
    parser.add_argument("--shape", choices=SHAPES, help="default small")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    quick, real = (400, 6, 20, "tiny"), (50000, 50, 200, "small")
    names = ("document", "turns", "new", "shape")
    for name, default in zip(names, quick if options.quick else real, strict=True):
        if getattr(options, name) is None:
            setattr(options, name, default)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    options = options_of(arguments)
    folder = out_folder(options)
    if options.show is None:
        torch.set_num_threads(options.threads)
        spec, dtype = SHAPES[options.shape]
        torch.backends.cuda.enable_cudnn_sdp(False)  # plans for every new length; see gpu.py
        model = spec.build(options.device, dtype)
        settings = {name: getattr(options, name) for name in ("document", "turns", "new", "shape")}
        record = {
            "benchmark": "conversation",
            "settings": {**settings, "dtype": str(dtype)},
            **facts(model.device),
            "rows": converse(model, options),
        }
        write_json(folder, "conversation.json", record)
    else:
        record = read_json(options.show)
    print(HEADER)
    print("\n".join(map(line_of, record["rows"])))


if __name__ == "__main__":
    main()
