"""Time a decoded token with fixed and growing buffers and with Transformers' own caches.

`generate` reads a prompt and decodes; a streamer records the time of every token. ``static_cache``
and ``dynamic_cache`` are Transformers' caches. The others are a `PolicyCache` that keeps everything
or, with FastKV, a tenth. Contenders take turns; ratios are of the same round. Writes
``decode.json``.

    python benchmarks/decode.py [--contexts 2048,8192] [--rounds 7] [--threads 2] [--compiled]
    python benchmarks/decode.py --quick
    python benchmarks/decode.py --show FILE
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import attrs
import torch
from torch import Tensor
from transformers import CompileConfig, DynamicCache, PreTrainedModel, StaticCache

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.clocks import TokenTimes
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
from kvpolicy import CachePolicy
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import FastKV, FullContext

# Number of first steps that are left out, since they include one-time work.
WARM_UP = 4
STATIC, DYNAMIC = "static_cache", "dynamic_cache"
POLICIES: dict[str, CachePolicy] = {"everything": FullContext(), "fastkv": FastKV()}
OPTIONS = (
    Option("contexts", [2048, 8192], quick=[64]),
    Option("rounds", 7, quick=1),
    Option("new-tokens", 48, at_least(WARM_UP + 3)),
    Option("compiled", False, help="compiled decoding as well"),
)
TABLE = Table(
    "rows",
    Column("cache", -23, "cache"),
    Column("tokens", 7, "context"),
    Column("held", 7, "held"),
    Column("token ms", 9, middle("token_ms"), ".2f"),
    Column("of static (range)", 24, extent("of_static", 3)),
    Column("dynamic x", 10, lambda row: row["dynamic_speedup"]["median"], ".2f"),
)


@attrs.frozen
class Contender:
    """A cache to decode with, and whether decoding is compiled.

    Args:
        make: Makes the cache for a model, a context and a number of new tokens.
        compiled: Whether `generate` compiles the decoding.
    """

    make: Callable[[PreTrainedModel, int, int], Any]
    compiled: bool = False


def _static(model: PreTrainedModel, context: int, count: int) -> StaticCache:
    return StaticCache(config=model.config, max_cache_len=context + count)


def _dynamic(model: PreTrainedModel, context: int, count: int) -> DynamicCache:
    return DynamicCache(config=model.config)


def _growing(policy: CachePolicy, model: PreTrainedModel, context: int, count: int) -> PolicyCache:
    return PolicyCache(policy)


def _fixed(policy: CachePolicy, model: PreTrainedModel, context: int, count: int) -> PolicyCache:
    return PolicyCache(policy, max_new_tokens=count)


def contenders(*, compiled: bool) -> dict[str, Contender]:
    """Return the contenders by name, the static cache first."""
    found = {STATIC: Contender(_static), DYNAMIC: Contender(_dynamic)}
    for name, policy in POLICIES.items():
        found[f"{name}, growing"] = Contender(partial(_growing, policy))
    for name, policy in POLICIES.items():
        found[f"{name}, fixed"] = Contender(partial(_fixed, policy))
        if compiled:
            found[f"{name}, compiled"] = Contender(partial(_fixed, policy), compiled=True)
    if compiled:
        found[f"{STATIC}, compiled"] = Contender(_static, compiled=True)
    return found


def take_turn(
    model: PreTrainedModel, prompt: Tensor, contender: Contender, count: int
) -> tuple[float, int]:
    """Read a prompt and decode; return milliseconds per token and the largest layer's size."""
    cache, clock = contender.make(model, prompt.shape[1], count), TokenTimes()
    how: dict[str, Any] = {}
    if contender.compiled:
        how["compile_config"] = CompileConfig(mode=None)
        how["compile_config"]._compile_all_devices = True
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        cache=cache,
        max_new_tokens=count,
        do_sample=False,
        streamer=clock,
        disable_compile=not contender.compiled,
        **how,
    )
    held = max(layer.keys.shape[2] for layer in cache.layers)
    return median(clock.steps_ms(1 + WARM_UP)), held


def rows_of(context: int, taken: dict[str, list[tuple[float, int]]]) -> list[Row]:
    """Return the rows of one prompt length."""
    times = {name: [ms for ms, _ in found] for name, found in taken.items()}
    return [
        {
            "cache": name,
            "context": context,
            "held": taken[name][-1][1],
            "token_ms": own,
            "of_static": spread(ratios(own, times[STATIC])),
            "dynamic_speedup": spread(ratios(times[DYNAMIC], own)),
        }
        for name, own in times.items()
    ]


def measure(run: Run) -> None:
    """Time every contender at every prompt length."""
    options, spec = run.options, TINY if run.options.quick else SMALL
    model = spec.build()
    settings = {
        "batch": 1,
        "model": attrs.asdict(spec),
        "rounds": options.rounds,
        "new_tokens": options.new_tokens,
        "policies": {name: repr(policy) for name, policy in POLICIES.items()},
    }
    run.begin(settings, "rows")
    for context in options.contexts:
        prompt = random_prompt(spec.vocab_size, context)
        turns = {
            name: partial(take_turn, model, prompt, each, options.new_tokens)
            for name, each in contenders(compiled=options.compiled).items()
        }
        run.add("rows", *rows_of(context, in_turns(turns, options.rounds)))


BENCHMARK = Benchmark("decode", __doc__, measure, OPTIONS, (TABLE,))
main = BENCHMARK.main

if __name__ == "__main__":
    main()
