"""Measure every method against full context on the processor: prefill, decoding, peak memory.

A small Llama of random weights reads prompts of 2,048, 8,192 and 32,768 tokens. In every round each
method has one turn, and so does the model without kvpolicy, so that a machine that becomes slower
affects all of them. Writes ``methods.json`` after every length, and a picture.

    python benchmarks/methods.py [--contexts 2048,8192,32768] [--rounds N] [--threads 2] [--out DIR]
"""

import argparse
import sys
from pathlib import Path

import attrs
from transformers import PreTrainedModel

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.common import (
    BASELINE,
    SMALL,
    TINY,
    ModelSpec,
    allowed,
    random_prompt,
    ratio_text,
    spread,
)
from benchmarks.harness import Benchmark, Column, Option, Row, Run, Table, middle, names_among
from benchmarks.memory import try_peak
from benchmarks.pictures import methods_picture
from kvpolicy import CachePolicy, build, registered
from kvpolicy.evaluation.comparison.times import Times, measure_times

OPTIONS = (
    # 32,768 tokens take about half a minute on two cores.
    Option("contexts", [2048, 8192, 32768], quick=[64, 128]),
    Option("rounds", least=1, quick=1, help="default 9, 5 and 3, by length"),
    Option("new-tokens", 16, quick=2, help="decoded"),
    Option("methods", help="with commas between; default all that are registered"),
    Option("memory-context", 32768, least=0, quick=128, help="0 leaves memory out"),
)


def _range(row: Row) -> str:
    middle, lowest, highest = (ratio_text(each) for each in row["prefill_speedup"].values())
    return f"{middle} ({lowest}-{highest})"


def _failed(row: Row) -> str | None:
    return None if row["peak"] else f"{row['policy']:<15}{row['context']:>7}  failed"


TIMES = Table(
    "rows",
    Column("method", -15, "policy"),
    Column("tokens", 7, "context"),
    Column("prefill s", 10, middle("prefill_ms", 1e3), ".2f"),
    Column("CPU s", 8, middle("prefill_cpu_ms", 1e3), ".2f"),
    Column("x (range)", 17, _range),
    Column("allowed", 8, lambda row: ratio_text(row["prefill_allowed"])),
    Column("decode ms", 10, middle("decode_ms"), ".2f"),
    Column("x", 5, lambda row: ratio_text(row["decode_speedup"]["median"])),
)
MEMORY = Table(
    "memory",
    Column("method", -15, "policy"),
    Column("tokens", 7, "context"),
    Column("peak MiB", 10, lambda row: row["peak"]["growth_bytes"] / 2**20, ".0f"),
    Column("of full", 9, "share_of_full", ".0%"),
    Column("process MiB", 13, lambda row: row["peak"]["peak_bytes"] / 2**20, ".0f"),
    Column("", 9, lambda row: "" if row["peak"]["exact"] else "at most"),
    instead=_failed,
    gap=True,
)


def rounds_for(context: int) -> int:
    """Return the number of rounds; long prompts need fewer, since their times vary less."""
    return 9 if context < 4096 else 5 if context < 16384 else 3


def row_of(name: str, times: Times, full: Times, context: int, limits: dict[str, float]) -> Row:
    """Return the results of one method at one length; ratios compare within a round."""
    row = {"policy": name, "context": context, **limits}
    for phase in ("prefill", "decode"):
        own, base = getattr(times, phase), getattr(full, phase)
        row[f"{phase}_ms"] = tuple(1000 * each for each in own)
        row[f"{phase}_cpu_ms"] = tuple(1000 * each for each in getattr(times, f"{phase}_cpu"))
        row[f"{phase}_speedup"] = spread(
            tuple(theirs / ours for ours, theirs in zip(own, base, strict=True))
        )
    return row


def rows_of(
    measured: dict[str, Times],
    policies: dict[str, CachePolicy],
    model: PreTrainedModel,
    context: int,
) -> list[Row]:
    """Return the rows of one length, first that of the model without kvpolicy."""
    known: dict[str, CachePolicy | None] = {BASELINE: None, **policies}
    return [
        row_of(name, measured[name], measured[BASELINE], context, allowed(policy, context, model))
        for name, policy in known.items()
    ]


def measure_memory(run: Run, spec: ModelSpec) -> None:
    """Measure the prefill's peak memory in a new process for each method."""
    context, full = run.options.memory_context, 0
    for name in (BASELINE, *run.options.policies):
        peak = try_peak(spec, name, context, threads=run.options.threads)
        if name == BASELINE and peak:
            full = peak["growth_bytes"]
        share = peak["growth_bytes"] / full if peak and full else None
        row = {"policy": name, "context": context, "peak": peak, "share_of_full": share}
        run.add("memory", row)


def choose(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    chosen = names_among(parser, "--methods", options.methods, registered("policy"))
    options.policies = {name: build(name) for name in chosen}


def measure(run: Run) -> None:
    """Measure times at every length, then memory."""
    options, spec = run.options, TINY if run.options.quick else SMALL
    model = spec.build()
    rounds = {each: options.rounds or rounds_for(each) for each in options.contexts}
    settings = {
        "batch": 1,
        "model": attrs.asdict(spec),
        "dtype": str(model.dtype),
        "rounds": {str(context): count for context, count in rounds.items()},
        "new_tokens": options.new_tokens,
        "policies": {name: repr(policy) for name, policy in options.policies.items()},
    }
    run.begin(settings, "rows", "memory")
    for context, count in rounds.items():
        prompt = random_prompt(spec.vocab_size, context)[0].tolist()
        measured = measure_times(
            model,
            [prompt] * count,
            {BASELINE: None, **options.policies},
            new_tokens=options.new_tokens,
        )
        run.add("rows", *rows_of(measured, options.policies, model, context))
    if options.memory_context:
        measure_memory(run, spec)


main = Benchmark(
    "methods", __doc__, measure, OPTIONS, (TIMES, MEMORY), picture=methods_picture, settle=choose
).main

if __name__ == "__main__":
    main()
