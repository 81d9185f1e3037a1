"""A decoded token with buffers of a fixed size, growing ones, and Transformers' own caches.

`generate` reads a prompt and decodes; a streamer tells the time of every token. ``static_cache``
and ``dynamic_cache`` are Transformers', the others a `PolicyCache` that keeps everything or, as
FastKV, a tenth. Contenders take turns; ratios are of the same round. Writes ``decode.json``.

    python benchmarks/decode.py [--contexts 2048,8192] [--rounds 7] [--threads 2] [--compiled]
    python benchmarks/decode.py --quick
    python benchmarks/decode.py --show FILE
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import attrs
import torch
from torch import Tensor
from transformers import CompileConfig, DynamicCache, PreTrainedModel, StaticCache

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.common import (
    at_least,
    facts,
    number,
    out_folder,
    parser_of,
    random_prompt,
    read_json,
    spread,
    whole_numbers,
    write_json,
)
from benchmarks.methods import SMALL, TINY
from kvpolicy import CachePolicy
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import FastKV, FullContext

# Steps at the start that are left out: what the first ones bring along is not a token's.
WARM_UP = 4
STATIC, DYNAMIC = "static_cache", "dynamic_cache"
POLICIES: dict[str, CachePolicy] = {"everything": FullContext(), "fastkv": FastKV()}
HEADER = (
    f"{'cache':<23}{'tokens':>7}{'held':>7}{'token ms':>9}{'of static (range)':>24}"
    f"{'dynamic x':>10}"
)


class Clock:
    """A streamer that writes down when a token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """A prompt or a token."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing more comes."""

    def steps(self) -> list[float]:
        """Milliseconds of each token but for the first ones."""
        ends = self.times[1 + WARM_UP :]  # after the prompt
        return [(end - start) * 1e3 for start, end in itertools.pairwise(ends)]


@attrs.frozen
class Contender:
    """A cache to decode with.

    Args:
        make: The cache for a model, a context and a number of new tokens.
        compiled: Whether `generate` compiles the decoding.
    """

    make: Callable[[PreTrainedModel, int, int], Any]
    compiled: bool = False


def _static(model: PreTrainedModel, context: int, count: int) -> StaticCache:
    return StaticCache(config=model.config, max_cache_len=context + count)


def _dynamic(model: PreTrainedModel, context: int, count: int) -> DynamicCache:
    return DynamicCache(config=model.config)


def contenders(*, compiled: bool) -> dict[str, Contender]:
    """By name, the static cache first."""
    found = {STATIC: Contender(_static), DYNAMIC: Contender(_dynamic)}
    for name, policy in POLICIES.items():
        found[f"{name}, growing"] = Contender(
            lambda model, context, count, policy=policy: PolicyCache(policy)
        )
    for name, policy in POLICIES.items():
        fixed = Contender(
            lambda model, context, count, policy=policy: PolicyCache(policy, max_new_tokens=count)
        )
        found[f"{name}, fixed"] = fixed
        if compiled:
            found[f"{name}, compiled"] = attrs.evolve(fixed, compiled=True)
    if compiled:
        found[f"{STATIC}, compiled"] = Contender(_static, compiled=True)
    return found


def take_turn(
    model: PreTrainedModel, prompt: Tensor, contender: Contender, count: int
) -> dict[str, Any]:
    """Read a prompt and decode: milliseconds of the tokens, and the most entries a layer holds."""
    cache, clock = contender.make(model, prompt.shape[1], count), Clock()
    how: dict[str, Any] = {}
    if contender.compiled:
        how["compile_config"] = CompileConfig(mode=None)
        how["compile_config"]._compile_all_devices = True
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        past_key_values=cache,
        max_new_tokens=count,
        do_sample=False,
        streamer=clock,
        disable_compile=not contender.compiled,
        **how,
    )
    held = max(layer.keys.shape[2] for layer in cache.layers)
    return {"token_ms": median(clock.steps()), "held": held}


def rows_at(
    model: PreTrainedModel, context: int, rounds: int, count: int, chosen: dict[str, Contender]
) -> list[dict[str, Any]]:
    """The rows of one length; a round before the first does not count."""
    prompt = random_prompt(model.config.vocab_size, context)
    names, times = list(chosen), {name: list[float]() for name in chosen}
    held: dict[str, int] = {}
    for turn in range(rounds + 1):
        for step in range(len(names)):
            name = names[(turn + step) % len(names)]
            found = take_turn(model, prompt, chosen[name], count)
            held[name] = found["held"]
            if turn:
                times[name].append(found["token_ms"])
    return [
        {
            "cache": name,
            "context": context,
            "held": held[name],
            "token_ms": taken,
            "of_static": spread(_ratios(taken, times[STATIC])),
            "dynamic_speedup": spread(_ratios(times[DYNAMIC], taken)),
        }
        for name, taken in times.items()
    ]


def _ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(above, below, strict=True)]


def line_of(row: dict[str, Any]) -> str:
    """One line of the table, at most 80 columns."""
    middle, lowest, highest = (f"{each:.3f}" for each in row["of_static"].values())
    extent = f"{middle} ({lowest}-{highest})"
    return (
        f"{row['cache']:<23}{row['context']:>7}{row['held']:>7}{median(row['token_ms']):>9.2f}"
        f"{extent:>24}{number(row['dynamic_speedup']['median'], 10)}"
    )


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--contexts", type=whole_numbers, help="default 2048,8192")
    parser.add_argument("--rounds", type=at_least(1), help="default 7")
    parser.add_argument("--new-tokens", type=at_least(WARM_UP + 3), default=48, help="default 48")
    parser.add_argument("--compiled", action="store_true", help="compiled decoding as well")
    options = parser.parse_args(arguments)
    options.contexts = options.contexts or ([64] if options.quick else [2048, 8192])
    options.rounds = options.rounds or (1 if options.quick else 7)
    return options


def measure(options: argparse.Namespace, folder: Path) -> None:
    """Measure everything; the result is written after every length."""
    spec = TINY if options.quick else SMALL
    model = spec.build()
    record: dict[str, Any] = {
        "benchmark": "decode",
        "settings": {
            "batch": 1,
            "model": attrs.asdict(spec),
            "rounds": options.rounds,
            "new_tokens": options.new_tokens,
            "policies": {name: repr(policy) for name, policy in POLICIES.items()},
        },
        **facts(model.device),
        "rows": [],
    }
    print(HEADER, flush=True)
    chosen = contenders(compiled=options.compiled)
    for context in options.contexts:
        rows = rows_at(model, context, options.rounds, options.new_tokens, chosen)
        print("\n".join(map(line_of, rows)), flush=True)
        record["rows"] += rows
        write_json(folder, "decode.json", record)


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
