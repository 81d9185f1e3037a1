"""Define the `kvpolicy` command with typer; a new command is one line in `COMMANDS`."""

import functools
import sys
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Annotated, Any

import typer

import kvpolicy
from kvpolicy.evaluation.commands.analyze import analyze
from kvpolicy.evaluation.commands.calibrate import calibrate
from kvpolicy.evaluation.commands.check import check
from kvpolicy.evaluation.commands.compare import compare
from kvpolicy.evaluation.commands.estimate import estimate
from kvpolicy.evaluation.commands.eval import eval
from kvpolicy.evaluation.commands.export import export
from kvpolicy.evaluation.commands.generate import generate
from kvpolicy.evaluation.commands.policies import policies
from kvpolicy.evaluation.commands.serve_check import serve_check
from kvpolicy.names import said

# Plain functions; see `kvpolicy.evaluation.commands.shared`.
COMMANDS: tuple[Callable[..., None], ...] = (
    analyze,
    calibrate,
    check,
    compare,
    estimate,
    eval,
    export,
    generate,
    policies,
    serve_check,
)

app = typer.Typer(
    name="kvpolicy",
    help="Decide which tokens a language model keeps while it reads a long prompt.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


class _Interrupted(Exception):  # noqa: N818 -- no error: the user has stopped a command
    """A Ctrl-C exception that typer does not recognise, so that it prints no empty line."""


def _interruptible(command: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(command)
    def run_command(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt:
            raise _Interrupted from None

    return run_command


for command in COMMANDS:
    app.command()(_interruptible(command))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvpolicy {kvpolicy.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Decide which tokens a language model keeps while it reads a long prompt."""


def _unknown_options(error: Exception, arguments: Sequence[str]) -> str | None:
    """Describe all unknown options; click stops at the first. None if the error is another."""
    first, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if type(error).__name__ != "NoSuchOption" or first is None or context is None:
        return None
    known = [
        name
        for each in context.command.get_params(context)
        for name in (*each.opts, *each.secondary_opts)
    ]
    written = takewhile(lambda each: each != "--", arguments)
    given = [each.partition("=")[0] for each in written if each.startswith("--")]
    wrong = dict.fromkeys([first, *(name for name in given if name not in known)])
    options = "option" if len(wrong) == 1 else "options"
    return f"No such {options}: {', '.join(said(name, known) for name in wrong)}"


def run(arguments: Sequence[str]) -> int:
    """Run a command line; a wrong one prints one line and returns 2. Ctrl-C is raised."""
    try:
        # Without a command, show the help instead of an error.
        args = list(arguments) or ["--help"]
        status = app(args=args, prog_name="kvpolicy", standalone_mode=False)
    except typer.Exit as stop:
        return stop.exit_code
    except (_Interrupted, typer.Abort):
        raise KeyboardInterrupt from None
    except Exception as error:
        # click's usage errors; where their class lives depends on the version of typer.
        describe = getattr(error, "format_message", None)
        if describe is None:
            raise
        wrong = _unknown_options(error, arguments) or describe()
        print(f"error: {' '.join(wrong.split())} (see --help)", file=sys.stderr)
        return 2
    return status if isinstance(status, int) else 0
