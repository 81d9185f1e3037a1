"""Measure how prefill, decoding and memory grow with context, batch and number of layers.

A small Llama of random weights runs on the processor; along each axis the other two stay fixed. In
every round each method has one turn. Exponents are fitted to the medians, see ``fits.py``.
Writes ``scaling.json`` after every point, and a picture.

    python benchmarks/scaling.py [--rounds N] [--threads 2] [--no-memory] [--out DIR]
    python benchmarks/scaling.py --quick
    python benchmarks/scaling.py --show FILE
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import attrs

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.common import (
    BASELINE,
    TINY,
    ModelSpec,
    policies_said,
    policy_of,
    random_prompt,
)
from benchmarks.fits import fits_of, table
from benchmarks.harness import (
    Benchmark,
    Column,
    Option,
    Row,
    Run,
    Table,
    Text,
    at_least,
    in_turns,
    middle,
)
from benchmarks.memory import try_peak
from benchmarks.operations import operations
from benchmarks.pictures import peak_mib, scaling_picture
from benchmarks.turns import take_turn

METHODS = (BASELINE, "snapkv", "fastkv", "gemfilter", "pyramidinfer")
SMALL = ModelSpec(hidden_size=128, num_layers=4, query_heads=4, kv_heads=2, intermediate_size=384)
OPTIONS = (
    Option("rounds", kind=at_least(1), quick=1, help="default 7, 3 and 2, by length"),
    Option("new-tokens", 9, at_least(2), quick=2, help="generated, all but the first timed"),
    Option("max-context", kind=at_least(1), help="leaves out longer prompts, which take longest"),
    Option("no-memory", False, help="leave peak memory out"),
)
TABLES = (
    Table(
        "points",
        Column("axis", -8, "axis"),
        Column("at", 7, "at"),
        Column("", 2, lambda row: ""),
        Column("method", -15, "policy"),
        Column("prefill s", 10, middle("prefill_ms", 1e3), ".3f"),
        Column("CPU s", 9, middle("prefill_cpu_ms", 1e3), ".3f"),
        Column("token ms", 10, middle("decode_ms"), ".2f"),
        Column("held MiB", 9, lambda row: row["held_bytes"] / 2**20, ".1f"),
        Column("peak MiB", 9, peak_mib, ".1f"),
    ),
    Text(lambda record: f"\n{table(record['fits'])}"),
)


@attrs.frozen
class Point:
    """A point on one of the axes (context, batch or layers) with its measurements.

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
        """Return the point's value on its axis."""
        return int(getattr(self, self.axis))


def points_of(
    contexts: Sequence[int], batches: Sequence[int], layers: Sequence[int], fixed: Point
) -> list[Point]:
    """Return the points on the three axes; two of the values are always as in ``fixed``."""
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


def rounds_for(point: Point) -> int:
    """Return the number of rounds; long prompts need fewer, since their times vary less."""
    return 7 if point.context <= 8192 else 3 if point.context <= 16384 else 2


def points_for(options: argparse.Namespace) -> list[Point]:
    """Return the points that a run measures."""
    points = QUICK if options.quick else REAL
    most = options.max_context
    return [point for point in points if most is None or point.context <= most]


def measure_point(
    point: Point, spec: ModelSpec, names: Sequence[str], rounds: int, new_tokens: int
) -> list[Row]:
    """Measure all methods at one point, in turns."""
    model = spec.build()
    prompt = random_prompt(spec.vocab_size, point.context, point.batch)
    policies = {name: policy_of(name) for name in names}
    turns = {
        name: partial(take_turn, model, prompt, policy, new_tokens)
        for name, policy in policies.items()
    }
    return [
        {
            **attrs.asdict(point),
            "at": point.at,
            "policy": name,
            "prefill_ms": [turn.prefill.wall_ms for turn in taken],
            "prefill_cpu_ms": [turn.prefill.cpu_ms for turn in taken],
            "decode_ms": [step.wall_ms for turn in taken for step in turn.decode],
            "held_bytes": taken[-1].held_bytes,
            "prefill_flops": point.batch * operations(policies[name], model, point.context).total,
            "peak": None,
        }
        for name, taken in in_turns(turns, rounds).items()
    ]


def measure(run: Run) -> None:
    """Measure every point, and fit the exponents again after each."""
    options, small = run.options, TINY if run.options.quick else SMALL
    points = points_for(options)
    rounds = [options.rounds or rounds_for(point) for point in points]
    settings = {
        "model": attrs.asdict(small),
        "dtype": "torch.float32",
        "rounds": rounds,
        "new_tokens": options.new_tokens,
        "policies": policies_said(METHODS),
    }
    run.begin(settings, "points", "fits")
    for point, count in zip(points, rounds, strict=True):
        spec = attrs.evolve(small, num_layers=point.layers)
        for row in measure_point(point, spec, METHODS, count, options.new_tokens):
            if not options.no_memory:
                how = {"batch": point.batch, "threads": options.threads}
                row["peak"] = try_peak(spec, row["policy"], point.context, **how)
            run.add("points", row)
        run.record["fits"] = fits_of(run.record["points"])
        run.write()


BENCHMARK = Benchmark("scaling", __doc__, measure, OPTIONS, TABLES, picture=scaling_picture)
main, options_of = BENCHMARK.main, BENCHMARK.options_of

if __name__ == "__main__":
    main()
