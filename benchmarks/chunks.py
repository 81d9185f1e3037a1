"""Peak memory and time of a prompt that is read in chunks, against one that is read at once.

A tiny Llama of random weights on the processor, every prompt in a process of its own. Longer
prompts are read in chunks only. Writes ``chunks.json`` after every prompt.

    python benchmarks/chunks.py [--contexts 100000,...] [--chunks 2048] [--methods NAME,...]
    python benchmarks/chunks.py --quick
    python benchmarks/chunks.py --show FILE
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.common import (
    BASELINE,
    ModelSpec,
    at_least,
    facts,
    number,
    out_folder,
    parser_of,
    policy_of,
    read_json,
    whole_numbers,
    write_json,
)
from benchmarks.memory import try_peak

METHODS = (BASELINE, "snapkv", "h2o", "fastkv", "gem_filter", "pyramid_infer")
TINY = ModelSpec(
    hidden_size=64,
    num_layers=2,
    query_heads=2,
    kv_heads=1,
    intermediate_size=128,
    max_positions=1 << 19,
)
CONTEXTS = [100_000]
# Read in chunks only, by methods whose work does not grow with all products of queries and keys.
LONG = [262_144]
LONG_METHODS = ("fastkv", "gem_filter")
HEADER = f"{'tokens':>7}  {'method':<15}{'chunk':>7}{'peak MiB':>10}{'CPU s':>9}"


def line_of(row: dict[str, Any]) -> str:
    """One prompt, at most 80 columns."""
    peak = row["peak"] or {}
    growth, cpu = peak.get("growth_bytes"), peak.get("cpu_ms")
    return (
        f"{row['context']:>7}  {row['policy']:<15}{row['chunk'] or '-':>7}"
        f"{number(None if growth is None else growth / 2**20, 10, 1)}"
        f"{number(None if cpu is None else cpu / 1e3, 9, 1)}"
    )


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--contexts", type=whole_numbers, help="tokens; default 100000")
    parser.add_argument(
        "--long", type=whole_numbers, help="read in chunks only, by few methods; default 262144"
    )
    parser.add_argument("--chunks", type=at_least(1), help="tokens of a forward; default 2048")
    parser.add_argument("--methods", help="names with commas between")
    parser.set_defaults(threads=1)
    options = parser.parse_args(arguments)
    quick = options.quick
    options.contexts = options.contexts or ([256] if quick else CONTEXTS)
    options.long = options.long or ([512] if quick else LONG)
    options.chunks = options.chunks or (64 if quick else 2048)
    options.methods = tuple(options.methods.split(",")) if options.methods else METHODS
    return options


def cells_of(options: argparse.Namespace) -> list[tuple[int, str, int | None]]:
    """Context, method and chunk of every prompt, in their order."""
    cells: list[tuple[int, str, int | None]] = [
        (context, name, chunk)
        for context in options.contexts
        for name in options.methods
        for chunk in (None, options.chunks)
    ]
    long = [name for name in LONG_METHODS if name in options.methods]
    return cells + [(context, name, options.chunks) for context in options.long for name in long]


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure everything; the result is written after every prompt."""
    record: dict[str, Any] = {
        "benchmark": "chunks",
        "settings": {
            "model": attrs.asdict(TINY),
            "dtype": "torch.float32",
            "threads": options.threads,
            "policies": {
                name: repr(policy_of(name)) if policy_of(name) else "DynamicCache"
                for name in options.methods
            },
        },
        **facts(torch.device("cpu")),
        "prompts": [],
    }
    print(HEADER, flush=True)
    for context, name, chunk in cells_of(options):
        peak = try_peak(TINY, name, context, threads=options.threads, chunk=chunk)
        row = {"context": context, "policy": name, "chunk": chunk, "peak": peak}
        record["prompts"].append(row)
        print(line_of(row), flush=True)
        write_json(folder, "chunks.json", record)
    return record


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    options = options_of(arguments)
    folder = out_folder(options)
    if options.show is None:
        measure(options, folder)
        return
    print(HEADER)
    for row in read_json(options.show)["prompts"]:
        print(line_of(row))


if __name__ == "__main__":
    main()
