"""A command made of a function and the class of its options."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import attrs
import pytest
import typer
from typer.testing import CliRunner

from kvpolicy.evaluation.commands.options import with_options
from kvpolicy.evaluation.options import Option, split_names


def numbers(texts: Sequence[str], option: str) -> dict[str, int]:
    found = dict(text.split("=") for text in split_names(texts, option))
    return {name: int(number) for name, number in found.items()}


@attrs.frozen
class Words:
    """A group of options."""

    words: Annotated[tuple[str, ...], Option("Words.", ("--word", "-w"), metavar="TEXT")] = ()
    sizes: Annotated[dict[str, int], Option("Sizes.", ("--size", "-s"), read=numbers)] = (
        attrs.field(factory=dict)
    )


@attrs.frozen(kw_only=True)
class Base:
    """Options that others extend."""

    count: Annotated[int, Option("A count.", min=2)] = 3


@attrs.frozen(kw_only=True)
class AllOptions(Base):
    """Options of every kind."""

    group: Words
    file: Annotated[Path, Option("A file.", metavar="FILE", positional=True)]
    name: Annotated[str, Option("A name.", metavar="NAME")]
    twice_count: Annotated[int, Option("Default: twice the count.")] = attrs.field()
    loud: Annotated[bool, Option("Loud.")] = False
    chat: Annotated[bool | None, Option("Chat.", ("--chat/--no-chat",))] = None
    _limit: Annotated[int | None, Option("A limit.")] = None
    no_option: str = "of the class alone"

    @twice_count.default
    def _twice(self) -> int:
        return 2 * self.count

    def __attrs_post_init__(self) -> None:
        if self.loud and self.chat:
            raise ValueError("--loud must not be given with --chat")


def run(*arguments: str) -> tuple[int, str, list[AllOptions]]:
    """Status, output and what the command was called with."""
    called: list[AllOptions] = []

    def show(options: AllOptions) -> None:
        """Show the options."""
        called.append(options)

    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command()(with_options(show))
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, list(arguments))
    if isinstance(result.exception, ValueError):
        raise result.exception
    return result.exit_code, result.output, called


def test_the_class_has_the_defaults() -> None:
    status, _, called = run("a.txt", "--name", "b")
    assert (status, called) == (0, [AllOptions(group=Words(), file=Path("a.txt"), name="b")])
    assert called[0].twice_count == 6


def test_what_is_given_reaches_the_class() -> None:
    status, _, called = run(
        *("a.txt", "--name", "b", "--count", "5", "--twice-count", "1", "--loud", "--no-chat"),
        *("--limit", "7", "-w", "x", "--word", "y", "-s", "p=1,q=2", "--size", "r=3"),
    )
    group = Words(("x", "y"), {"p": 1, "q": 2, "r": 3})
    expected = AllOptions(
        count=5, group=group, file=Path("a.txt"), name="b", twice_count=1, loud=True, chat=False
    )
    assert (status, called) == (0, [attrs.evolve(expected, limit=7)])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("a.txt",), "Missing option '--name'"),
        (("--name", "b"), "Missing argument 'FILE'"),
        (("a.txt", "--name", "b", "--count", "1"), "Invalid value for '--count'"),
        (("a.txt", "--name", "b", "--no-option", "c"), "No such option"),
        (("a.txt", "--name", "b", "--no-loud"), "No such option"),
    ],
)
def test_the_command_line_is_checked(arguments: tuple[str, ...], said: str) -> None:
    status, shown, called = run(*arguments)
    assert (status, called) == (2, [])
    assert said in shown


def test_readers_and_classes_check_too() -> None:
    with pytest.raises(ValueError, match=r"^--size must be names separated by commas"):
        run("a.txt", "--name", "b", "-s", "p=1,")
    with pytest.raises(ValueError, match=r"^--loud must not be given with --chat$"):
        run("a.txt", "--name", "b", "--loud", "--chat")


def test_help_says_what_the_class_does() -> None:
    shown = run("--help")[1]
    assert "Show the options." in shown
    options = [" ".join(line.split()) for line in shown.partition("Options:\n")[2].splitlines()]
    assert options == [
        "--name NAME A name. [required]",
        "--count N A count. [default: 3; x>=2]",
        "-w, --word TEXT Words.",
        "-s, --size N Sizes.",
        "--twice-count N Default: twice the count.",
        "--loud Loud.",
        "--chat / --no-chat Chat.",
        "--limit N A limit.",
        "--help Show this message and exit.",
    ]
    assert re.search(r"FILE .*A file\. +\[required\]", shown)


def test_a_command_without_options_stays_as_it_is() -> None:
    def show() -> None:
        """Show nothing."""

    assert with_options(show) is show
