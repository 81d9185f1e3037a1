"""Parse command lines: the options of all benchmarks, and a script's own."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from kvpolicy.evaluation.results import check_folder

RESULTS = Path(__file__).resolve().parents[1] / "results"
# The folder of a quick run's results, which never replace those of a real run.
QUICK_RESULTS = Path("results") / "benchmarks"


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


@attrs.frozen
class Option:
    """An option of a script's command line.

    Args:
        name: Name without the dashes, words separated by ``-``.
        default: Default of a real run; False makes the option a flag.
        kind: Reads the text; if None, as the default's type says.
        quick: Default of a quick run, if it differs.
        help: Help text; the default is added.
        how: Other arguments for `argparse`, such as ``choices``.
    """

    name: str
    default: Any = None
    kind: Callable[[str], Any] | None = None
    quick: Any = None
    help: str = ""
    how: dict[str, Any] = attrs.field(factory=dict)

    def add_to(self, parser: argparse.ArgumentParser) -> None:
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
