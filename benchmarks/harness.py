"""The shared frame of all benchmarks: options, tables, and a record that is written as it grows.

A script makes one `Benchmark` of its options, its tables and a function that measures; `chunks.py`
is a short one. ``--quick`` is a tiny run of any of them, and ``--show FILE`` only shows a result.
"""

import argparse
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import attrs
import torch

from benchmarks.common import facts, read_json, write_json
from benchmarks.pictures import draw
from kvpolicy.evaluation.results import check_folder

RESULTS = Path(__file__).resolve().parent / "results"
# The folder of a quick run's results, which never replace those of a real run.
QUICK_RESULTS = Path("results") / "benchmarks"
Row = dict[str, Any]
T = TypeVar("T")


# The command line.


def whole_numbers(text: str) -> list[int]:
    """Parse comma-separated numbers of at least 1; return them sorted, without repeats."""
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = [0]
    if found[0] < 1:
        raise argparse.ArgumentTypeError(
            f"must be whole numbers of at least 1 with commas between, such as 2048,8192, got "
            f"{text!r}"
        )
    return found


def at_least(minimum: int) -> Callable[[str], int]:
    """Return an argparse type that accepts whole numbers of at least ``minimum``."""

    def whole_number(text: str) -> int:
        if not re.fullmatch(r"\d+", text) or int(text) < minimum:
            raise argparse.ArgumentTypeError(
                f"must be a whole number of at least {minimum}, got {text!r}"
            )
        return int(text)

    return whole_number


def names_among(
    parser: argparse.ArgumentParser, option: str, text: str | None, known: Collection[str]
) -> list[str]:
    """Return names with commas between, all that are known for None; end the program at others."""
    chosen = list(known) if text is None else text.split(",")
    if unknown := sorted(set(chosen) - set(known)):
        parser.error(f"{option} must be among {', '.join(known)}, got {', '.join(unknown)}")
    return chosen


@attrs.frozen
class Option:
    """An option of a script's command line, its name without the dashes.

    The text is read as the default's type says, or as a whole number of at least ``least``; False
    makes it a flag. A quick run may have another default. The help text gets the default.
    """

    name: str
    default: Any = None
    quick: Any = None
    help: str = ""
    choices: Sequence[str] | None = None
    least: int | None = None

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        if self.default is False:
            parser.add_argument(f"--{self.name}", action="store_true", help=self.help)
            return
        kinds: dict[type, Callable[[str], Any]] = {
            **{int: at_least(1), list: whole_numbers, float: float},
            tuple: lambda text: tuple(text.split(",")),
        }
        by_default = kinds.get(type(self.default), str)
        kind = by_default if self.least is None else at_least(self.least)
        shown = self.default
        if isinstance(shown, list | tuple):
            shown = ",".join(map(str, shown))
        said = [self.help] if self.help else []
        said += [f"default {shown}"] if shown not in (None, "") else []
        how: dict[str, Any] = {"choices": self.choices, "help": "; ".join(said)}
        parser.add_argument(f"--{self.name}", type=kind, **how)

    def settle(self, options: argparse.Namespace) -> None:
        name = self.name.replace("-", "_")
        if getattr(options, name) is None:
            quick = options.quick and self.quick is not None
            setattr(options, name, self.quick if quick else self.default)


def parser_of(description: str, threads: int = 2) -> argparse.ArgumentParser:
    """Return an argparse parser with the options of all benchmarks."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny run, to see that it works")
    said = f"of torch; default {threads}"
    parser.add_argument("--threads", type=at_least(1), default=threads, help=said)
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument(
        "--show", type=Path, metavar="FILE", help="measure nothing; table and picture of a result"
    )
    return parser


def out_folder(options: argparse.Namespace) -> Path:
    """Return the folder for the results, after checking that it is writable."""
    if options.out is None and options.show is not None:
        folder = options.show.parent
    else:
        folder = options.out or (QUICK_RESULTS if options.quick else RESULTS)
    check_folder(folder)
    return Path(folder)


# Tables.


@attrs.frozen
class Column:
    """One column of a table: a key of the row or a function of it; None is shown as a dash.

    A negative width aligns the cells to the left.
    """

    title: str
    width: int
    value: str | Callable[[Row], Any]
    form: str = ""

    def head(self) -> str:
        return self._placed(self.title)

    def cell(self, row: Row) -> str:
        found = row.get(self.value) if isinstance(self.value, str) else self.value(row)
        return self._placed("-" if found is None else format(found, self.form))

    def _placed(self, text: str) -> str:
        return text.ljust(-self.width) if self.width < 0 else text.rjust(self.width)


class Table:
    """A table of one part of a benchmark's record, a list of rows.

    ``instead`` returns the text of a row that the columns do not fit, such as one that failed, and
    None for others. A table that is not ``live`` is printed at the end. ``gap`` is an empty line
    before it.
    """

    def __init__(
        self,
        part: str,
        *columns: Column,
        instead: Callable[[Row], str | None] = lambda row: None,
        live: bool = True,
        gap: bool = False,
    ) -> None:
        self.part, self.columns, self.instead = part, columns, instead
        self.live, self.gap = live, gap

    @property
    def header(self) -> str:
        return "\n" * self.gap + "".join(each.head() for each in self.columns).rstrip()

    def line(self, row: Row) -> str:
        found = self.instead(row)
        if found is not None:
            return found
        return "".join(each.cell(row) for each in self.columns).rstrip()

    def text(self, record: dict[str, Any]) -> str:
        return "\n".join([self.header, *map(self.line, record[self.part])])


def middle(key: str, unit: float = 1.0) -> Callable[[Row], float]:
    """Return a column function: the median of a row's list of numbers, in a unit."""
    return lambda row: median(row[key]) / unit


def extent(key: str, digits: int = 2) -> Callable[[Row], str]:
    """Return a column function: median with minimum and maximum in brackets; empty for None.

    Example:
        >>> extent("x")({"x": {"median": 2.0, "lowest": 1.5, "highest": 4.0}})
        '2.00 (1.50-4.00)'
    """

    def said(row: Row) -> str:
        if row[key] is None:
            return ""
        middle, lowest, highest = (f"{each:.{digits}f}" for each in row[key].values())
        return f"{middle} ({lowest}-{highest})"

    return said


# Runs.


@attrs.define(slots=False)
class Run:
    """One run of a benchmark: its options, and the record that it fills and writes to its folder.

    Rows of the tables are printed as they are added. The file is replaced in one step, so that an
    interrupted run leaves what it has measured.
    """

    options: argparse.Namespace
    folder: Path
    name: str
    tables: Sequence[Table] = ()
    record: dict[str, Any] = attrs.field(factory=dict)
    headed: set[str] = attrs.field(factory=set)  # parts whose table has begun

    def begin(self, settings: dict[str, Any], *parts: str, device: Any = "cpu") -> dict[str, Any]:
        """Start the record with name, settings, versions, machine and empty lists of rows."""
        self.record = {"benchmark": self.name, "settings": settings, **facts(torch.device(device))}
        self.record |= {part: [] for part in parts}
        return self.record

    def add(self, part: str, *rows: Row) -> None:
        """Add rows to a part of the record, print them as table lines, and write the file."""
        for table in (each for each in self.tables if each.live and each.part == part):
            head = [] if part in self.headed else [table.header]
            self.headed.add(part)
            print("\n".join([*head, *map(table.line, rows)]), flush=True)
        self.record[part] += rows
        self.write()

    def write(self) -> None:
        write_json(self.folder, f"{self.name}.json", self.record)


@attrs.frozen
class Benchmark:
    """A benchmark script: its options, its measurement, and its tables.

    ``doc`` is the script's docstring. ``measure`` adds its rows to the run. All benchmarks have
    some ``options`` more. ``picture`` draws a record. ``settle`` checks and completes the options;
    it also gets the parser. ``threads`` are torch's if the command line does not set them.
    """

    name: str
    doc: str
    measure: Callable[[Run], None]
    options: Sequence[Option] = ()
    tables: Sequence[Table] = ()
    notes: str = ""
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
        tables = (table.text(record) for table in self.tables)
        return "\n".join(filter(None, (*tables, self.notes)))

    def main(self, arguments: Sequence[str] | None = None) -> None:
        """Measure, print and write results, or show earlier ones; then draw the picture."""
        options = self.options_of(arguments)
        folder = out_folder(options)
        if options.show is None:
            torch.set_num_threads(options.threads)
            run = Run(options, folder, self.name, self.tables)
            self.measure(run)
            record = run.record
            late = [table.text(record) for table in self.tables if not table.live]
            for text in filter(None, (*late, self.notes)):
                print(text, flush=True)
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
    """Run contenders in turns, for several rounds; return by name the results that count.

    One round is run first and left out, to warm up; each round starts with the next contender.
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
