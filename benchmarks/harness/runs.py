"""Run measurements: contenders take turns, and results go to a record and its file."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch

from benchmarks.common import facts, read_json, write_json
from benchmarks.pictures import draw

from .options import Option, out_folder, parser_of
from .tables import Row, Table, Text

T = TypeVar("T")


class Run:
    """One run of a benchmark: its options, and the record that it fills and writes to its folder.

    Rows of the tables are printed as they are added.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        folder: Path,
        name: str,
        tables: Sequence[Table | Text] = (),
    ) -> None:
        self.options, self.folder, self.name = options, folder, name
        self.record: dict[str, Any] = {}
        self._tables = {each.part: each for each in tables if isinstance(each, Table) and each.live}
        self._headed: set[str] = set()

    def begin(self, settings: dict[str, Any], *parts: str, device: Any = "cpu") -> dict[str, Any]:
        """Start the record with name, settings, versions, machine and empty lists of rows."""
        self.record = {"benchmark": self.name, "settings": settings, **facts(torch.device(device))}
        self.record |= {part: [] for part in parts}
        return self.record

    def add(self, part: str, *rows: Row) -> None:
        """Add rows to a part of the record, print them as table lines, and write the file."""
        self.head(part)
        if part in self._tables:
            print("\n".join(map(self._tables[part].line, rows)), flush=True)
        self.record[part] += rows
        self.write()

    def head(self, part: str) -> None:
        if part in self._tables and part not in self._headed:
            print(self._tables[part].header, flush=True)
            self._headed.add(part)

    def write(self) -> None:
        write_json(self.folder, f"{self.name}.json", self.record)


@attrs.frozen
class Benchmark:
    """A benchmark script: its options, its measurement, and its tables.

    Args:
        name: Name of the benchmark, and of its file without the ending.
        doc: The script's docstring.
        measure: Measures, and adds its rows to the run.
        options: Options of the command line, besides those that all benchmarks have.
        tables: Tables that are printed, in this order.
        picture: Draws a record.
        settle: Checks and completes the options; it also gets the parser.
        threads: Torch's threads if the command line does not set them.
    """

    name: str
    doc: str
    measure: Callable[[Run], None]
    options: Sequence[Option] = ()
    tables: Sequence[Table | Text] = ()
    picture: Callable[[dict[str, Any]], bytes] | None = None
    settle: Callable[[argparse.Namespace, argparse.ArgumentParser], None] | None = None
    threads: int = 2

    def options_of(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        parser = parser_of(self.doc, self.threads)
        for option in self.options:
            option.add_to(parser)
        options = parser.parse_args(arguments)
        for option in self.options:
            option.settle(options)
        if self.settle is not None:
            self.settle(options, parser)
        return options

    def text(self, record: dict[str, Any]) -> str:
        return "\n".join(filter(None, (table.text(record) for table in self.tables)))

    def main(self, arguments: Sequence[str] | None = None) -> None:
        """Measure, print and write results, or show earlier ones; then draw the picture."""
        options = self.options_of(arguments)
        folder = out_folder(options)
        if options.show is None:
            torch.set_num_threads(options.threads)
            run = Run(options, folder, self.name, self.tables)
            self.measure(run)
            record = run.record
            for table in self.tables:
                if not table.live:
                    print(table.text(record), flush=True)
        else:
            record = read_json(options.show)
            print(self.text(record))
        if self.picture is not None:
            picture = self.picture
            draw(folder, f"{self.name}.png", lambda: picture(record))


def in_turns(
    contenders: Mapping[str, Callable[[], T]],
    rounds: int,
    *,
    warm_up: bool = True,
    rotate: bool = True,
) -> dict[str, list[T]]:
    """Run contenders in turns, for several rounds.

    Args:
        contenders: By name, the function to run in each round.
        rounds: Number of rounds that count.
        warm_up: Whether one round is run first and left out.
        rotate: Whether each round starts with the next contender.

    Returns:
        By name, the results of the rounds that count, in their order.

    Example:
        >>> taken = in_turns({"a": iter("xyz").__next__, "b": iter("uvw").__next__}, 2)
        >>> taken
        {'a': ['y', 'z'], 'b': ['v', 'w']}
    """
    names, taken = list(contenders), {name: list[T]() for name in contenders}
    for turn in range(0 if warm_up else 1, rounds + 1):
        start = turn % len(names) if rotate else 0
        for name in [*names[start:], *names[:start]]:
            found = contenders[name]()
            if turn:
                taken[name].append(found)
    return taken


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(above, below, strict=True)]
