"""Runs that measure: contenders in turns, a record, and the file that it is written to."""

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
    """A run that measures: its options, and the record that it fills.

    Args:
        options: The command line.
        folder: Of the file.
        name: The benchmark's.
        file: The file's name.
        tables: Which rows are printed.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        folder: Path,
        name: str,
        file: str,
        tables: Sequence[Table | Text] = (),
    ) -> None:
        self.options, self.folder, self.name, self.file = options, folder, name, file
        self.record: dict[str, Any] = {}
        self._tables = {each.part: each for each in tables if isinstance(each, Table) and each.live}
        self._headed: set[str] = set()

    def begin(self, settings: dict[str, Any], *parts: str, device: Any = "cpu") -> dict[str, Any]:
        """Begin the record: the benchmark, its settings, versions and machine, and empty parts.

        Args:
            settings: What a result says of how it came to be.
            parts: Names of lists of rows.
            device: The model's.
        """
        self.record = {"benchmark": self.name, "settings": settings, **facts(torch.device(device))}
        self.record |= {part: [] for part in parts}
        return self.record

    def add(self, part: str, *rows: Row) -> None:
        """Add rows to a part, print them as lines of its table, and write the file."""
        self.head(part)
        if part in self._tables:
            print("\n".join(map(self._tables[part].line, rows)), flush=True)
        self.record[part] += rows
        self.write()

    def head(self, part: str) -> None:
        """Print the header of a part's table, once."""
        if part in self._tables and part not in self._headed:
            print(self._tables[part].header, flush=True)
            self._headed.add(part)

    def write(self) -> None:
        """Replace the file in one step."""
        write_json(self.folder, self.file, self.record)


@attrs.frozen
class Benchmark:
    """A script: its options, what it measures and how that is shown.

    Args:
        name: Of the benchmark, and of its file but for the ending.
        doc: The script's docstring.
        measure: Measures, and adds to the run what it finds.
        options: Of the command line, beside those that all have.
        tables: What is printed, in this order.
        picture: Draws a record.
        settle: Checks and completes the options, told of the parser.
        file: The file's name by the options, where it is not the benchmark's.
        threads: Of torch, where the command line does not say.
    """

    name: str
    doc: str
    measure: Callable[[Run], None]
    options: Sequence[Option] = ()
    tables: Sequence[Table | Text] = ()
    picture: Callable[[dict[str, Any]], bytes] | None = None
    settle: Callable[[argparse.Namespace, argparse.ArgumentParser], None] | None = None
    file: Callable[[argparse.Namespace], str] | None = None
    threads: int = 2

    def options_of(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """The command line."""
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
        """All tables of a record."""
        return "\n".join(filter(None, (table.text(record) for table in self.tables)))

    def main(self, arguments: Sequence[str] | None = None) -> None:
        """Measure, print and write, or show a result; and draw it."""
        options = self.options_of(arguments)
        folder = out_folder(options)
        file = f"{self.name}.json" if self.file is None else self.file(options)
        if options.show is None:
            torch.set_num_threads(options.threads)
            run = Run(options, folder, self.name, file, self.tables)
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
            draw(folder, file.replace(".json", ".png"), lambda: picture(record))


def in_turns(
    contenders: Mapping[str, Callable[[], T]],
    rounds: int,
    *,
    warm_up: bool = True,
    rotate: bool = True,
    done: Callable[[int], None] = lambda turn: None,
) -> dict[str, list[T]]:
    """Let contenders take turns in rounds.

    Args:
        contenders: By name, what is run when its turn has come.
        rounds: That count.
        warm_up: Whether a round before them is run and left out.
        rotate: Whether who goes first moves on by one in every round.
        done: Told of the number of every round that is over, 0 for the one that is left out.

    Returns:
        By name the results of the rounds that count, in their order.

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
        done(turn)
    return taken


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Of the same round, one over the other."""
    return [one / other for one, other in zip(above, below, strict=True)]


class Ledger:
    """The file of a study of many rows: what it holds already is not measured again.

    Args:
        path: The file.
        head: What stands above the rows in a new file.
        places: Keys by which a row is known.
    """

    def __init__(self, path: Path, head: dict[str, Any], places: Sequence[str]) -> None:
        self.path, self.places = path, places
        self.data = read_json(path) if path.exists() else {**head, "rows": []}

    def lacks(self, *place: Any) -> bool:
        """Whether no row has these values at the keys by which rows are known."""
        return all([row[key] for key in self.places] != list(place) for row in self.data["rows"])

    def add(self, row: Row) -> None:
        """Add a row and replace the file in one step."""
        self.data["rows"].append(row)
        write_json(self.path.resolve().parent, self.path.name, self.data)
