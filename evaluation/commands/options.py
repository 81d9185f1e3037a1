"""Makes a command of a function that takes one attrs class, whose fields are the options.

A command is two files. One has the class of its options, and a function of them, whose docstring is
the help; it imports neither torch nor Transformers, so that help and wrong options need neither.
The other does the work. `kvpolicy.evaluation.commands.check` is a short one::

    @attrs.frozen(kw_only=True)
    class CheckOptions(LoadingOptions):
        context: Annotated[int, Option("Tokens of the context to check for.", min=1)] = 32768

    def check(options: CheckOptions) -> None:
        work("check", options)  # calls run_check in kvpolicy.evaluation.commands.work.check

- A field of type ``Annotated[type, Option(help, ...)]`` is an option. Without a default it must be
  given; where it is not given, the class has its own default, which may be computed.
- A tuple can be given several times. A bool is a flag.
- A field whose type is another such class, or a base class, brings all of its options; those that
  several commands have are in `kvpolicy.evaluation.options`.
- Any other field is no option, and needs a default.
- What must hold between options is checked in the class, by a ValueError.

The function's name in `app.py` makes it a command.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import attrs
import typer

from kvpolicy.evaluation.options import Option

Options = TypeVar("Options")


def with_options(command: Callable[[Options], None]) -> Callable[..., None]:
    """Wrap a command that takes an options object, so that typer sees one parameter per option.

    Args:
        command: A function whose one parameter is of an attrs class; one without is unchanged.
    """
    kinds = [hint for name, hint in get_type_hints(command).items() if name != "return"]
    if not kinds:
        return command
    (kind,) = kinds

    def run_command(**given: Any) -> None:
        command(_built(kind, given))

    # As in any signature, required parameters come first.
    parameters = sorted(_parameters(kind), key=lambda it: it.default is not it.empty)
    run_command.__name__, run_command.__doc__ = command.__name__, command.__doc__
    run_command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run_command


def _fields(kind: type[Any]) -> Iterator[tuple[str, Any, Any, Option | None]]:
    """Yield each field of an options class: name, default, type and option (None if nested)."""
    hints = get_type_hints(kind, include_extras=True)
    for field in attrs.fields(kind):
        name, hint = field.name.lstrip("_"), hints[field.name]  # as attrs' constructors do
        if attrs.has(hint):
            yield name, field.default, hint, None
        elif get_origin(hint) is Annotated:
            yield name, field.default, *get_args(hint)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _parameters(kind: type[Any]) -> Iterator[inspect.Parameter]:
    """Yield a typer parameter for each option of a command, with its default in the help."""
    for name, default, hint, option in _fields(kind):
        if option is None:
            yield from _parameters(hint)
            continue
        given = hint
        if get_origin(hint) in (tuple, dict):  # repeatable
            given = list[str if option.read else get_args(hint)[0]]  # type: ignore[misc]
        elif option.read:
            given = str
        metavar = None if hint in (bool, bool | None) else option.metavar
        about: dict[str, Any] = {"metavar": metavar, "help": option.help, "min": option.min}
        names = option.names or (_flag(name),)
        info = typer.Argument(**about) if option.positional else typer.Option(*names, **about)
        if default is attrs.NOTHING:
            default = inspect.Parameter.empty
        elif not isinstance(default, str | int | float):
            given, default = given | None, None
        yield inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[given, info],
        )


def _built(kind: type[Any], given: dict[str, Any]) -> Any:
    """Build an options class from the given command-line values; unset ones get its defaults."""
    values: dict[str, Any] = {}
    for name, _, hint, option in _fields(kind):
        if option is None:
            values[name] = _built(hint, given)
        elif (value := given[name]) is not None and value != []:
            if option.read is not None:
                value = option.read(value, (*option.names, _flag(name))[0])
            values[name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)
