"""The shared frame of all benchmarks: a script adds its contenders and a function `measure`.

A script makes one `Benchmark` of its options, its tables and a function that measures::

    OPTIONS = (Option("contexts", [2048, 8192], quick=[64]), Option("rounds", 7, quick=1))
    TABLE = Table("rows", Column("cache", -20, "cache"), Column("token ms", 9, "token_ms", ".2f"))

    def measure(run: Run) -> None:
        run.begin({"rounds": run.options.rounds}, "rows")
        for context in run.options.contexts:
            taken = in_turns(contenders(context), run.options.rounds)
            run.add("rows", *rows_of(context, taken))

    BENCHMARK = Benchmark("tokens", __doc__, measure, OPTIONS, (TABLE,))
    main = BENCHMARK.main

- `Benchmark` reads the command line, with ``--quick``, ``--threads``, ``--out`` and ``--show`` in
  every script; sets torch's threads; and shows an earlier result again, with its picture.
- `Run` holds the record. `Run.add` prints rows as lines of their table and replaces the file in one
  step, so that an interrupted run leaves what it has measured.
- `in_turns` lets contenders take turns, so that a disturbance of a round affects all of them.
"""

from .options import QUICK_RESULTS, RESULTS, Option, at_least, out_folder, parser_of, whole_numbers
from .runs import Benchmark, Run, in_turns, ratios
from .tables import Column, Row, Table, Text, extent, middle

__all__ = [
    "QUICK_RESULTS",
    "RESULTS",
    "Benchmark",
    "Column",
    "Option",
    "Row",
    "Run",
    "Table",
    "Text",
    "at_least",
    "extent",
    "in_turns",
    "middle",
    "out_folder",
    "parser_of",
    "ratios",
    "whole_numbers",
]
