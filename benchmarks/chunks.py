"""Measure peak memory and time of a prompt that is read in chunks, compared with all at once.

A tiny Llama of random weights runs on the processor. Every prompt is read in its own process, both
ways in turns. Then prompts of growing length are read in chunks only. Writes ``chunks.json`` after
every method, and ``chunks.png``: how memory grows.

    python benchmarks/chunks.py [--contexts 100000,...] [--rounds 3] [--growing 16384,...]
                                [--chunks 2048] [--methods NAME,...]
"""

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import attrs

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.common import BASELINE, ModelSpec, policy_of, spread
from benchmarks.harness import Benchmark, Column, Option, Row, Run, Table, extent, in_turns
from benchmarks.memory import try_peak
from benchmarks.pictures import chunks_picture

METHODS = (BASELINE, "snapkv", "h2o", "fastkv", "gemfilter", "pyramidinfer")
TINY = ModelSpec(
    hidden_size=64,
    num_layers=2,
    query_heads=2,
    kv_heads=1,
    intermediate_size=128,
    max_positions=1 << 19,
)
GROWING = [16_384, 32_768, 65_536, 131_072, 262_144]
OPTIONS = (
    Option("contexts", [100_000], quick=[256], help="tokens"),
    Option("rounds", 3, quick=1),
    Option("growing", GROWING, quick=[256, 512], help="tokens, read in chunks only, once"),
    Option("chunks", 2048, quick=64, help="tokens of a forward"),
    Option("methods", METHODS, help="with commas between"),
)


def _of_peaks(key: str, unit: float, choose: Any) -> Any:
    """Return a column function that reduces a row's values over the measured rounds."""

    def value(row: Row) -> float | None:
        found = [each[key] for each in row["peaks"] if each is not None]
        return choose(found) / unit if found else None

    return value


TABLE = Table(
    "prompts",
    Column("tokens", 7, "context"),
    Column("", 2, lambda row: ""),
    Column("method", -15, "policy"),
    Column("chunk", 7, "chunk"),
    Column("peak MiB", 10, _of_peaks("growth_bytes", 2**20, max), ".1f"),
    Column("CPU s", 9, _of_peaks("cpu_ms", 1e3, median), ".1f"),
    Column("of at once (range)", 22, extent("cpu_of_whole")),
)


def rows_of(options: argparse.Namespace) -> Iterator[list[Row]]:
    prompts = [(context, options.rounds, False) for context in options.contexts]
    prompts += [(context, 1, True) for context in options.growing]
    for context, rounds, grows in prompts:
        for name in options.methods:
            read = partial(try_peak, TINY, name, context, threads=options.threads)
            chunks = (options.chunks,) if grows else (None, options.chunks)
            ways = {str(chunk): partial(read, chunk=chunk) for chunk in chunks}
            taken = in_turns(ways, rounds, warm_up=False, rotate=False)
            yield [
                {
                    "context": context,
                    "grows": grows,
                    "policy": name,
                    "chunk": chunk,
                    "peaks": taken[str(chunk)],
                    "cpu_of_whole": None if chunk is None or grows else _of_whole(taken, chunk),
                }
                for chunk in chunks
            ]


def _of_whole(taken: dict[str, list[Any]], chunk: int) -> dict[str, float] | None:
    pairs = zip(taken[str(chunk)], taken["None"], strict=True)
    both = [ours["cpu_ms"] / theirs["cpu_ms"] for ours, theirs in pairs if ours and theirs]
    return spread(both) if both else None


def measure(run: Run) -> None:
    settings = {
        "model": attrs.asdict(TINY),
        "dtype": "torch.float32",
        "threads": run.options.threads,
        "policies": {
            name: "DynamicCache" if name == BASELINE else repr(policy_of(name))
            for name in run.options.methods
        },
    }
    run.begin(settings, "prompts")
    for rows in rows_of(run.options):
        run.add("prompts", *rows)


BENCHMARK = Benchmark(
    "chunks", __doc__, measure, OPTIONS, (TABLE,), picture=chunks_picture, threads=1
)
main, options_of = BENCHMARK.main, BENCHMARK.options_of

if __name__ == "__main__":
    main()
