"""The frame that all benchmarks share, so that a script is its contenders and one `measure`.

A script makes one `Benchmark` of its options, its tables and a function that measures::

    OPTIONS = (Option("contexts", [2048, 8192], quick=[64]), Option("rounds", 7, quick=1))
    TABLE = Table("rows", Column("cache", -20, "cache"), Column("token ms", 9, "token_ms", ".2f"))

    def measure(run: Run) -> None:
        run.begin({"rounds": run.options.rounds}, "rows")
        for context in run.options.contexts:
            taken = in_turns(contenders(context), run.options.rounds)
            run.add("rows", *rows_of(context, taken))

    BENCHMARK = Benchmark("decode", __doc__, measure, OPTIONS, (TABLE,))
    main = BENCHMARK.main

- `Benchmark` reads the command line, with ``--quick``, ``--threads``, ``--out`` and ``--show`` in
  every script; sets torch's threads; and shows a result again, its picture with it.
- `Run` holds the record. `Run.add` prints rows as lines of their table and replaces the file in one
  step, so that a run that is cut short leaves what it had measured.
- `in_turns` lets contenders take turns, so that what disturbs a round disturbs all of them.
- `Ledger` is the file of a long study, in which nothing is measured a second time.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import attrs
import torch

from benchmarks.common import facts, read_json, write_json
from benchmarks.pictures import draw
from kvpolicy.evaluation.results import check_folder

RESULTS = Path(__file__).resolve().parent / "results"
# Where a quick run writes, so that it never takes the place of a real one.
QUICK_RESULTS = Path("results") / "benchmarks"

Row = dict[str, Any]
T = TypeVar("T")


def whole_numbers(text: str) -> list[int]:
    """Comma-separated numbers of at least 1, ascending, each once.

    Raises:
        argparse.ArgumentTypeError: They are not.
    """
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
    """A type of argparse: a whole number of at least ``minimum``."""

    def whole_number(text: str) -> int:
        if not re.fullmatch(r"\d+", text) or int(text) < minimum:
            raise argparse.ArgumentTypeError(
                f"must be a whole number of at least {minimum}, got {text!r}"
            )
        return int(text)

    return whole_number


@attrs.frozen
class Option:
    """An option of a script's command line.

    Args:
        name: Without the dashes, words apart by ``-``.
        default: Of a real run; False makes it a flag.
        kind: Reads the text; by the default's type if None: a whole number of at least 1, such
            numbers with commas between, or text.
        quick: Of a quick run, if it is another one.
        help: What it is; the default is added.
        how: What else `argparse` is told, such as ``choices``.
    """

    name: str
    default: Any = None
    kind: Callable[[str], Any] | None = None
    quick: Any = None
    help: str = ""
    how: dict[str, Any] = attrs.field(factory=dict)

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Add it to a parser; where it is not given it is None there."""
        if self.default is False:
            parser.add_argument(f"--{self.name}", action="store_true", help=self.help)
            return
        kinds: dict[type, Callable[[str], Any]] = {int: at_least(1), list: whole_numbers}
        shown = self.default
        if isinstance(shown, list | tuple):
            shown = ("," if "nargs" not in self.how else " ").join(map(str, shown))
        said = (
            self.help if shown in (None, "") else f"{self.help}; default {shown}".removeprefix("; ")
        )
        kind = self.kind or kinds.get(type(self.default), str)
        parser.add_argument(f"--{self.name}", type=kind, help=said, **self.how)

    def settle(self, options: argparse.Namespace) -> None:
        """Put its default where it was not given."""
        name = self.name.replace("-", "_")
        if getattr(options, name) is None:
            quick = options.quick and self.quick is not None
            setattr(options, name, self.quick if quick else self.default)


def parser_of(description: str, threads: int = 2) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks have.

    Args:
        description: A script's docstring, of which the first line is shown.
        threads: Of torch, where the command line does not say.
    """
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
    """Where results go; checked before anything is measured.

    Raises:
        ValueError: It cannot be written to.
    """
    if options.out is None and options.show is not None:
        folder = options.show.parent
    else:
        folder = options.out or (QUICK_RESULTS if options.quick else RESULTS)
    check_folder(folder)
    return Path(folder)


@attrs.frozen
class Column:
    """A column of a table.

    Args:
        title: Its head.
        width: Characters; below 0 its cells stand at the left.
        value: A key of the row, or what is read off a row; None is shown as a dash.
        form: How a value is formatted, such as ``.2f``.
    """

    title: str
    width: int
    value: str | Callable[[Row], Any]
    form: str = ""

    def head(self) -> str:
        """Its title in its width."""
        return self._placed(self.title)

    def cell(self, row: Row) -> str:
        """A row's value in its width."""
        found = row.get(self.value) if isinstance(self.value, str) else self.value(row)
        return self._placed("-" if found is None else format(found, self.form))

    def _placed(self, text: str) -> str:
        return text.ljust(-self.width) if self.width < 0 else text.rjust(self.width)


class Table:
    """A table of one part of a record.

    Args:
        part: The part's name, whose value is a list of rows.
        columns: From left to right.
        instead: The text of a row that the columns do not fit, such as one that failed; None for
            the others.
        live: Whether rows are printed as they are measured; the others come at the end.
        gap: Whether an empty line stands before it.
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
        """The line above the rows."""
        return "\n" * self.gap + "".join(each.head() for each in self.columns)

    def line(self, row: Row) -> str:
        """One row."""
        found = self.instead(row)
        if found is not None:
            return found
        return "".join(each.cell(row) for each in self.columns).rstrip()

    def text(self, record: dict[str, Any]) -> str:
        """The header and all rows of a record."""
        return "\n".join([self.header, *map(self.line, record[self.part])])


class Text:
    """What is said of a record at the end and is no table of rows.

    Args:
        text: Makes it.
    """

    live = False

    def __init__(self, text: Callable[[dict[str, Any]], str]) -> None:
        self.text = text


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


def middle(key: str, unit: float = 1.0) -> Callable[[Row], float]:
    """For a column: the median of a row's list of numbers, in units."""
    return lambda row: median(row[key]) / unit


def extent(key: str, digits: int = 2) -> Callable[[Row], str]:
    """For a column: a row's median and, in brackets, the lowest and the highest; empty for None.

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
