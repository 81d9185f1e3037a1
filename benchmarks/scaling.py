"""How prefill, decoding and memory grow with the context, the batch and the number of layers.

A small Llama of random weights on the processor; along each axis the other two stay as they are.
In every round each method has one turn. Exponents are fitted to the medians, see ``fits.py``.
Writes ``scaling.json`` after every point, and a picture.

    python benchmarks/scaling.py [--rounds N] [--threads 2] [--no-memory] [--out DIR]
    python benchmarks/scaling.py --quick
    python benchmarks/scaling.py --show FILE
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
    random_prompt,
    read_json,
    spread,
    write_json,
)
from benchmarks.fits import fits_of, table
from benchmarks.memory import try_peak
from benchmarks.pictures import draw, scaling_picture
from benchmarks.turns import Turn, take_turn
from kvpolicy.evaluation import estimate, shape_of
from kvpolicy.policies import FullContext

METHODS = (BASELINE, "snapkv", "fastkv", "gem_filter", "pyramid_infer")
SMALL = ModelSpec(hidden_size=128, num_layers=4, query_heads=4, kv_heads=2, intermediate_size=384)
TINY = ModelSpec(
    hidden_size=48, num_layers=4, query_heads=6, kv_heads=2, intermediate_size=80, vocab_size=97
)


@attrs.frozen
class Point:
    """A place on an axis.

    Args:
        axis: ``context``, ``batch`` or ``layers``.
        context: Tokens of a row.
        batch: Rows.
        layers: Decoder layers.
    """

    axis: str
    context: int
    batch: int
    layers: int

    @property
    def at(self) -> int:
        """Where on its axis."""
        return int(getattr(self, self.axis))


def points_of(
    contexts: Sequence[int], batches: Sequence[int], layers: Sequence[int], fixed: Point
) -> list[Point]:
    """The points of the three axes; along each, the other two are as in ``fixed``."""
    return [
        *(attrs.evolve(fixed, axis="context", context=at) for at in contexts),
        *(attrs.evolve(fixed, axis="batch", batch=at) for at in batches),
        *(attrs.evolve(fixed, axis="layers", layers=at) for at in layers),
    ]


REAL = points_of(
    [2048, 4096, 8192, 16384, 32768, 65536],
    [1, 2, 4, 8],
    [2, 4, 8, 16],
    Point("", context=4096, batch=1, layers=4),
)
QUICK = points_of([64, 128], [1, 2], [2, 4], Point("", context=64, batch=1, layers=2))


HEADER = (
    f"{'axis':<8}{'at':>7}  {'method':<15}{'prefill s':>10}{'CPU s':>9}{'token ms':>10}"
    f"{'held MiB':>9}{'peak MiB':>9}"
)


def line_of(row: dict[str, Any]) -> str:
    """One measured point, at most 80 columns."""
    peak = row["peak"]
    return (
        f"{row['axis']:<8}{row['at']:>7}  {row['policy']:<15}"
        f"{spread(row['prefill_ms'])['median'] / 1e3:>10.3f}"
        f"{spread(row['prefill_cpu_ms'])['median'] / 1e3:>9.3f}"
        f"{spread(row['decode_ms'])['median']:>10.2f}{row['held_bytes'] / 2**20:>9.1f}"
        f"{number(None if peak is None else peak['growth_bytes'] / 2**20, 9, 1)}"
    )


def rounds_for(point: Point) -> int:
    """Fewer of the long prompts, whose times vary less."""
    return 7 if point.context <= 8192 else 3 if point.context <= 16384 else 2


def measure_point(
    point: Point, spec: ModelSpec, names: Sequence[str], rounds: int, new_tokens: int
) -> list[dict[str, Any]]:
    """All methods at one point, in turns; a round before the first is not counted."""
    spec = attrs.evolve(spec, num_layers=point.layers)
    model = spec.build()
    prompt = random_prompt(spec.vocab_size, point.context, point.batch)
    policies = {name: policy_of(name) for name in names}
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    for taken_rounds in range(rounds + 1):
        for step in range(len(names)):
            name = names[(taken_rounds + step) % len(names)]
            turn = take_turn(model, prompt, policies[name], new_tokens)
            if taken_rounds:
                turns[name].append(turn)
    shape = shape_of(model.config)
    return [
        {
            **attrs.asdict(point),
            "at": point.at,
            "policy": name,
            "prefill_ms": [turn.prefill.wall_ms for turn in taken],
            "prefill_cpu_ms": [turn.prefill.cpu_ms for turn in taken],
            "decode_ms": [step.wall_ms for turn in taken for step in turn.decode],
            "held_bytes": taken[-1].held_bytes,
            "prefill_flops": point.batch
            * estimate(policies[name] or FullContext(), shape, point.context).prefill.total,
            "peak": None,
        }
        for name, taken in turns.items()
    ]


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=at_least(1), help="default 7, 3 and 2, by length")
    parser.add_argument(
        "--new-tokens", type=at_least(2), default=9, help="generated; default 9, 8 of them timed"
    )
    parser.add_argument(
        "--max-context", type=at_least(1), help="leaves out longer prompts, which take longest"
    )
    parser.add_argument("--no-memory", action="store_true", help="leave peak memory out")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.new_tokens = options.rounds or 1, 2
    return options


def points_for(options: argparse.Namespace) -> list[Point]:
    """The points that a run measures."""
    points = QUICK if options.quick else REAL
    most = options.max_context
    return [point for point in points if most is None or point.context <= most]


def measure(options: argparse.Namespace, folder: Path) -> None:
    """Measure everything; the result is written after every point."""
    spec = TINY if options.quick else SMALL
    points = points_for(options)
    record: dict[str, Any] = {
        "benchmark": "scaling",
        "settings": {
            "model": attrs.asdict(spec),
            "dtype": "torch.float32",
            "rounds": [options.rounds or rounds_for(point) for point in points],
            "new_tokens": options.new_tokens,
            "policies": {
                name: repr(policy_of(name)) if policy_of(name) else "DynamicCache"
                for name in METHODS
            },
        },
        **facts(torch.device("cpu")),
        "points": [],
        "fits": [],
    }
    print(HEADER, flush=True)
    for point in points:
        rounds = options.rounds or rounds_for(point)
        rows = measure_point(point, spec, METHODS, rounds, options.new_tokens)
        for row in rows:
            if not options.no_memory:
                row["peak"] = try_peak(
                    attrs.evolve(spec, num_layers=point.layers),
                    row["policy"],
                    point.context,
                    batch=point.batch,
                    threads=options.threads,
                )
            print(line_of(row), flush=True)
        record["points"] += rows
        record["fits"] = fits_of(record["points"])
        write_json(folder, "scaling.json", record)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write and draw."""
    options = options_of(arguments)
    folder = out_folder(options)
    torch.set_num_threads(options.threads)
    path = options.show
    if path is None:
        path = folder / "scaling.json"
        measure(options, folder)
    record = read_json(path)
    print(f"\n{table(record['fits'])}")
    draw(folder, "scaling.png", lambda: scaling_picture(record))


if __name__ == "__main__":
    main()
