"""Measure what a policy adds to Transformers' `DynamicCache`: operators, Python calls, CPU time.

Counts are of one layer: those of a tiny Llama of 16 layers less those of 8, divided by 8. They do
not depend on the machine. A decoded token is counted in `generate`, and in a loop of forwards in an
`attached` block. Times are the processor's on one thread: of a token in `generate`, and of the
forward of a prompt in an `attached` block. Contenders take turns, and ratios are of the same round.
One model is bound by Python (32 layers, hidden size 64, 4 query and 2 KV heads), one by arithmetic
(16 layers, hidden size 512, 8 query and 2 KV heads). Writes ``overhead.json``.

    python benchmarks/overhead.py [--policies SnapKV,FastKV] [--repeats 9] [--counts-only]
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import fmean, median
from types import FrameType
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Cache, DynamicCache, PreTrainedModel

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.common import BASELINE, TINY, ModelSpec, random_prompt, spread
from benchmarks.harness import (
    Benchmark,
    Column,
    Option,
    Row,
    Run,
    Table,
    extent,
    in_turns,
    middle,
    names_among,
    ratios,
)
from benchmarks.timing import TokenTimes
from kvpolicy import CachePolicy
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import AdaKV, FastKV, FullContext, KeyDiff, SnapKV, StreamingLLM

# Models whose difference shows what a layer costs, without what a forward costs once.
SIZES = (8, 16)
MODELS = {
    "python": ModelSpec(64, 32, query_heads=4, kv_heads=2, intermediate_size=128),
    "arithmetic": ModelSpec(512, 16, query_heads=8, kv_heads=2, intermediate_size=1536),
}
BOUNDED = "SnapKV bounded"
# The most that a token may take of DynamicCache's, and the least speed of a prompt of 512 tokens.
WANTED_TOKEN = {"AdaKV": 1.15, BOUNDED: 1.15}
WANTED_PROMPT = {"FullContext": 0.97, "SnapKV": 0.85, "FastKV": 1.1}
POLICIES: dict[str, Callable[[int, int], CachePolicy]] = {
    "FullContext": lambda layers, tokens: FullContext(),
    "StreamingLLM": lambda layers, tokens: StreamingLLM(0.1),
    "SnapKV": lambda layers, tokens: SnapKV(0.1),
    "KeyDiff": lambda layers, tokens: KeyDiff(0.1),
    "FastKV": lambda layers, tokens: FastKV(tsp_layer=layers // 2 - 1),
    "AdaKV": lambda layers, tokens: AdaKV(0.1),
    # Chooses once in the tokens that are measured.
    BOUNDED: lambda layers, tokens: SnapKV(0.1, decoding=SnapKV().decoding_rule(64, every=tokens)),
}
OPTIONS = (
    Option("policies", ",".join(POLICIES)),
    Option("contexts", [128, 512, 2048], quick=[32], help="prompts that are timed"),
    Option("prompt", 512, least=32, quick=64, help="tokens before those that count"),
    Option("tokens", 128, least=4, quick=4, help="decoded, and timed"),
    Option("counted-tokens", 32, least=2, quick=4, help="decoded, and counted"),
    Option("repeats", 9, quick=1),
    Option("counts-only", False, help="without times"),
)

# Makes a contender's cache for a model.
MakeCache = Callable[[PreTrainedModel], Cache]


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A counter of torch's operators, after composite ones were taken apart."""

    count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


class Calls:
    """A counter of the calls of Python functions in this thread, of whichever library."""

    count = 0

    def __enter__(self) -> Calls:
        gc.disable()  # what it ends elsewhere would count
        sys.setprofile(self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.setprofile(None)
        gc.enable()

    def _note(self, frame: FrameType, event: str, arg: Any) -> None:
        self.count += event == "call"


COUNTERS: dict[str, Callable[[], Operators | Calls]] = {"operators": Operators, "calls": Calls}


def contenders(names: Sequence[str], layers: int, tokens: int) -> dict[str, MakeCache]:
    """Return Transformers' own cache and the policies' caches by name, for so many layers."""
    found: dict[str, MakeCache] = {BASELINE: lambda model: DynamicCache(config=model.config)}
    for name in names:
        policy = POLICIES[name](layers, tokens)
        found[name] = lambda model, policy=policy: PolicyCache(policy)  # type: ignore[misc]
    return found


def forward(model: PreTrainedModel, ids: Tensor, cache: Cache) -> None:
    model(ids, cache=cache, use_cache=True, logits_to_keep=1)


def attached(cache: Cache, model: PreTrainedModel) -> Any:
    return cache.attached(model) if isinstance(cache, PolicyCache) else nullcontext(cache)


def generate(
    model: PreTrainedModel, prompt: Tensor, cache: Cache, tokens: int, read: Callable[[], float]
) -> list[float]:
    """Decode greedily in `generate`; return by how much a reading grows at every decoded token.

    The first token is the prompt's, and the second may do one-time work: both are left out.
    """
    readings = TokenTimes(read)
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        cache=cache,
        max_new_tokens=tokens + 2,
        do_sample=False,
        streamer=readings,
        disable_compile=True,
    )
    return readings.steps(2)


@torch.no_grad()
def counts(
    model: PreTrainedModel, make: MakeCache, prompt: Tensor, tokens: int, kind: str
) -> dict[str, list[float]]:
    """Count a prompt, a token in a loop, and every token in `generate`."""
    new = COUNTERS[kind]
    for _ in range(2):  # what is found once for a model is not counted
        cache, of_prompt, of_token = make(model), new(), new()
        with attached(cache, model):
            with of_prompt:
                forward(model, prompt, cache)
            forward(model, prompt[:, :1], cache)
            with of_token:
                forward(model, prompt[:, :1], cache)
    with new() as counter:
        every = generate(model, prompt, make(model), tokens, lambda: counter.count)
    return {"prompt": [of_prompt.count], "loop": [of_token.count], "token": every}


def layer_counts(
    made: Mapping[int, MakeCache], context: int, tokens: int, kind: str
) -> dict[str, float]:
    """Return what one layer counts in a prompt, a token in a loop, and a token in `generate`.

    ``token`` is the median token's; ``mean`` is the mean, which includes the growth of buffers.
    """
    models = {size: attrs.evolve(TINY, num_layers=size).build() for size in SIZES}
    prompt = random_prompt(64, context)
    few, many = (counts(models[size], made[size], prompt, tokens, kind) for size in SIZES)
    width = SIZES[1] - SIZES[0]
    layer = {
        part: [(more - less) / width for less, more in zip(few[part], many[part], strict=True)]
        for part in few
    }
    found = {part: median(each) for part, each in layer.items()}
    return {**found, "mean": fmean(layer["token"])}


def count_rows(names: Sequence[str], context: int, tokens: int, kind: str) -> list[Row]:
    """Return a row of counts for each contender, with what it adds to the first."""
    rows: list[Row] = []
    for name in [BASELINE, *names]:
        made = {size: contenders(names, size, tokens)[name] for size in SIZES}
        own = layer_counts(made, context, tokens, kind)
        added = {f"{key}_added": own[key] - rows[0][key] if rows else None for key in own}
        rows.append({"policy": name, **own, **added})
    return rows


@torch.no_grad()
def prompt_ms(model: PreTrainedModel, make: MakeCache, prompt: Tensor) -> dict[str, float]:
    """Return the mean CPU milliseconds of a prompt, and of making and attaching its cache."""
    times = max(1, 1024 // prompt.shape[1])  # a short one is over before the clock says much
    inside, start = 0.0, time.thread_time()
    for _ in range(times):
        cache = make(model)
        with attached(cache, model):
            before = time.thread_time()
            forward(model, prompt, cache)
            inside += time.thread_time() - before
    whole = time.thread_time() - start
    return {"ms": 1e3 * inside / times, "attach_ms": 1e3 * (whole - inside) / times}


def token_ms(
    model: PreTrainedModel, make: MakeCache, prompt: Tensor, tokens: int
) -> dict[str, float]:
    return {"ms": 1e3 * fmean(generate(model, prompt, make(model), tokens, time.thread_time))}


def time_rows(
    head: Row, turns: Mapping[str, Callable[[], dict[str, float]]], repeats: int, *, speed: bool
) -> list[Row]:
    """Time the contenders in turns; return a row for each, with its ratio to the first.

    For a speed, this is the first's time over the contender's, so that more is faster.
    """
    rows: list[Row] = []
    for name, taken in in_turns(turns, repeats).items():
        own: Row = {key: [each[key] for each in taken] for key in taken[0]}
        base = (rows[0] if rows else own)["ms"]
        ratio = ratios(base, own["ms"]) if speed else ratios(own["ms"], base)
        rows.append({**head, "policy": name, **own, "ratio": spread(ratio)})
    return rows


def measure(run: Run) -> None:
    """Count, then time both models."""
    options, names = run.options, run.options.policies
    specs = {"python": TINY} if options.quick else MODELS
    settings = {
        "prompt": options.prompt,
        "tokens": options.tokens,
        "counted_tokens": options.counted_tokens,
        "repeats": options.repeats,
        "models": {name: attrs.asdict(spec) for name, spec in specs.items()},
        "policies": {name: repr(POLICIES[name](32, options.tokens)) for name in names},
    }
    run.begin(settings, *COUNTERS, "tokens", "prompts")
    wanted_token = dict.fromkeys(names, 1.03) | WANTED_TOKEN
    counted = [name for name in names if name != BOUNDED]
    for kind in COUNTERS:
        run.add(kind, *count_rows(counted, options.prompt, options.counted_tokens, kind))
    for name, spec in {} if options.counts_only else specs.items():
        model = spec.build()
        makes = contenders(names, spec.num_layers, options.tokens)
        timed: list[Any] = [
            ("tokens", options.prompt, partial(token_ms, tokens=options.tokens), wanted_token)
        ]
        for context in options.contexts:
            limits = WANTED_PROMPT if (name, context) == ("python", 512) else {}
            timed.append(("prompts", context, prompt_ms, limits))
        for part, context, work, wanted in timed:
            prompt = random_prompt(spec.vocab_size, context)
            turns = {each: partial(work, model, make, prompt) for each, make in makes.items()}
            head = {"model": name, "context": context}
            for row in time_rows(head, turns, options.repeats, speed=part == "prompts"):
                run.add(part, {**row, "wanted": wanted.get(row["policy"])})


def choose(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    options.policies = names_among(parser, "--policies", options.policies, POLICIES)


def _counts_table(part: str, title: str) -> Table:
    columns = []
    heads = {"prompt": "prompt", "loop": "loop", "token": "generate", "mean": "mean"}
    for key, head in heads.items():
        columns += [Column(head, 9, key, ".1f"), Column("adds", 7, f"{key}_added", "+.1f")]
    return Table(part, Column(title, -16, "policy"), *columns, live=False, gap=part != "operators")


def _times_table(part: str, title: str, *more: Column) -> Table:
    return Table(
        part,
        Column(title, -15, "policy"),
        Column("model", 11, "model"),
        Column("prompt", 7, "context"),
        Column("ms", 8, middle("ms"), ".2f"),
        Column(title.split()[-1], 23, extent("ratio", 3)),
        Column("wanted", 7, "wanted", ".2f"),
        *more,
        live=False,
        gap=True,
    )


NOTES = """
Operators and Python calls are of one layer: of a prompt; of a decoded token in
a loop of forwards; of the median token and of the mean token in generate.
cost: CPU time of a token in generate, over DynamicCache's; wanted is the most.
speed: DynamicCache's CPU time of a prompt's forward, over the policy's; wanted
is the least. attach: milliseconds of making and attaching the cache before it."""
BENCHMARK = Benchmark(
    "overhead",
    __doc__,
    measure,
    OPTIONS,
    (
        _counts_table("operators", "operators"),
        _counts_table("calls", "Python calls"),
        _times_table("tokens", "token's cost"),
        _times_table("prompts", "prompt's speed", Column("attach", 8, middle("attach_ms"), ".2f")),
    ),
    notes=NOTES,
    settle=choose,
    threads=1,
)
main = BENCHMARK.main

if __name__ == "__main__":
    main()
