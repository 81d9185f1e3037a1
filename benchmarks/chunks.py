"""Peak memory and time of a prompt that is read in chunks, against one that is read at once.

A tiny Llama of random weights on the processor, every prompt in a process of its own, both ways
in turns. Then prompts that grow are read in chunks only. Writes ``chunks.json`` after every method,
and ``chunks.png``: how memory grows.

    python benchmarks/chunks.py [--contexts 100000,...] [--rounds 3] [--growing 16384,...]
                                [--chunks 2048] [--methods NAME,...]
    python benchmarks/chunks.py --quick
    python benchmarks/chunks.py --show FILE
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
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
    spread,
    whole_numbers,
    write_json,
)
from benchmarks.memory import try_peak
from benchmarks.pictures import chunks_picture, draw

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
# Read in chunks only, once.
GROWING = [16_384, 32_768, 65_536, 131_072, 262_144]
HEADER = (
    f"{'tokens':>7}  {'method':<15}{'chunk':>7}{'peak MiB':>10}{'CPU s':>9}"
    f"{'of at once (range)':>22}"
)


def line_of(row: dict[str, Any]) -> str:
    """One prompt, at most 80 columns; of all rounds the highest peak and the median time."""
    found = [each for each in row["peaks"] if each is not None]
    growth = max((each["growth_bytes"] for each in found), default=None)
    cpu = median(each["cpu_ms"] for each in found) if found else None
    ratio, shown = row["cpu_of_whole"], ""
    if ratio is not None:
        shown = f"{ratio['median']:.2f} ({ratio['lowest']:.2f}-{ratio['highest']:.2f})"
    return (
        f"{row['context']:>7}  {row['policy']:<15}{row['chunk'] or '-':>7}"
        f"{number(None if growth is None else growth / 2**20, 10, 1)}"
        f"{number(None if cpu is None else cpu / 1e3, 9, 1)}{shown:>22}"
    ).rstrip()


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--contexts", type=whole_numbers, help="tokens; default 100000")
    parser.add_argument("--rounds", type=at_least(1), help="default 3")
    parser.add_argument(
        "--growing", type=whole_numbers, help="read in chunks only; default 16384,...,262144"
    )
    parser.add_argument("--chunks", type=at_least(1), help="tokens of a forward; default 2048")
    parser.add_argument("--methods", help="names with commas between")
    parser.set_defaults(threads=1)
    options = parser.parse_args(arguments)
    quick = options.quick
    options.contexts = options.contexts or ([256] if quick else CONTEXTS)
    options.rounds = options.rounds or (1 if quick else 3)
    options.growing = options.growing or ([256, 512] if quick else GROWING)
    options.chunks = options.chunks or (64 if quick else 2048)
    options.methods = tuple(options.methods.split(",")) if options.methods else METHODS
    return options


def rows_of(options: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """For each context and method, what each way of reading took in every round."""
    ways = [(context, options.rounds, False) for context in options.contexts]
    ways += [(context, 1, True) for context in options.growing]
    for context, rounds, grows in ways:
        chunks = (options.chunks,) if grows else (None, options.chunks)
        for name in options.methods:
            peaks: dict[int | None, list[dict[str, Any] | None]] = {each: [] for each in chunks}
            for _ in range(rounds):
                for chunk, found in peaks.items():
                    found.append(
                        try_peak(TINY, name, context, threads=options.threads, chunk=chunk)
                    )
            yield [
                {
                    "context": context,
                    "grows": grows,
                    "policy": name,
                    "chunk": chunk,
                    "peaks": found,
                    "cpu_of_whole": _ratios(found, peaks[None])
                    if chunk and None in peaks
                    else None,
                }
                for chunk, found in peaks.items()
            ]


def _ratios(
    chunked: Sequence[dict[str, Any] | None], whole: Sequence[dict[str, Any] | None] | None
) -> dict[str, float] | None:
    """Of the processor's time, in the rounds in which both were measured."""
    if whole is None:
        return None
    both = [
        ours["cpu_ms"] / theirs["cpu_ms"]
        for ours, theirs in zip(chunked, whole, strict=True)
        if ours is not None and theirs is not None
    ]
    return spread(both) if both else None


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure everything; the result is written after every method."""
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
    for rows in rows_of(options):
        record["prompts"] += rows
        print("\n".join(map(line_of, rows)), flush=True)
        write_json(folder, "chunks.json", record)
    return record


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    options = options_of(arguments)
    folder = out_folder(options)
    if options.show is None:
        record = measure(options, folder)
    else:
        record = read_json(options.show)
        print(HEADER)
        print("\n".join(map(line_of, record["prompts"])))
    draw(folder, "chunks.png", lambda: chunks_picture(record))


if __name__ == "__main__":
    main()
