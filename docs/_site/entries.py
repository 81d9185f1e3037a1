"""The text of the pages of docs/reference, made from the package; imports nothing of Sphinx.

A page holds a comment where what is made goes:

- ``<!-- public names: MODULE -->``: all names in the module's ``__all__``, with their docstrings;
- ``<!-- public names: MODULE, kind: CLASS -->``: those of them that are of a class of ``kvpolicy``;
- ``<!-- commands -->``: every command of ``kvpolicy`` with its options, from its parser.
"""

import importlib
import inspect
import re
from typing import Any

NAMES = re.compile(r"^<!-- public names: ([\w.]+)(?:, kind: (\w+))? -->$", re.MULTILINE)
COMMANDS = "<!-- commands -->"


def names_in(module: str, kind: str | None) -> list[str]:
    """Return the names in a module's ``__all__``, or those of them that are of a kind.

    Args:
        module: The module's name.
        kind: The name of a class of ``kvpolicy``, such as Scorer; None for all names.
    """
    package = importlib.import_module(module)
    names: list[str] = package.__all__
    if kind is None:
        return names
    base = getattr(importlib.import_module("kvpolicy"), kind)
    return [name for name in names if issubclass(getattr(package, name), base)]


def name_entries(module: str, kind: str | None) -> str:
    """Return the MyST text that shows the names of a module with their docstrings."""
    lines = ["```{eval-rst}", f".. currentmodule:: {module}", ""]
    for name in names_in(module, kind):
        found = getattr(importlib.import_module(module), name)
        if not inspect.isclass(found):
            directive = "autofunction"
        else:
            directive = "autoexception" if issubclass(found, Exception) else "autoclass"
        lines += [f".. {directive}:: {module}.{name}"]
        lines += ["   :members:", ""] if directive != "autofunction" else [""]
    return "\n".join([*lines, "```"])


def command_entries() -> str:
    """Return the MyST text that shows every command with its help, arguments and options."""
    import typer

    from kvpolicy.evaluation.commands.app import app

    group: Any = typer.main.get_command(app)
    lines: list[str] = []
    for name in sorted(group.commands):
        command = group.commands[name]
        arguments = [each for each in command.params if each.param_type_name == "argument"]
        options = [each for each in command.params if each.param_type_name == "option"]
        line = " ".join(["kvpolicy", name, *map(_argument, arguments), "[OPTIONS]"])
        lines += [f"## {name}", "", inspect.cleandoc(command.help or ""), ""]
        lines += ["```text", line, "```", "", "```{eval-rst}", f".. program:: kvpolicy {name}", ""]
        for each in arguments:
            lines += [f".. describe:: {_argument(each)}", "", f"   {_help(each)}", ""]
        for each in options:
            lines += [f".. option:: {_option(each)}", "", f"   {_help(each)}", ""]
        lines += ["```", ""]
    return "\n".join(lines)


def _argument(argument: Any) -> str:
    """Return how a usage line shows an argument."""
    name = argument.metavar or argument.name.upper()
    return f"{name}..." if argument.nargs == -1 else str(name)


def _option(option: Any) -> str:
    """Return an option's names, each with the name of its value."""
    value = "" if option.is_flag else f" {option.metavar or option.type.name.upper()}"
    return ", ".join(f"{name}{value}" for name in (*option.opts, *option.secondary_opts))


def _help(option: Any) -> str:
    """Return an option's help with its default, and whether it is required or repeatable."""
    text = re.sub(r"(?<![\w`])(--[a-z-]+)", r"``\1``", (option.help or "").rstrip())
    said = [text.replace("*", r"\*")]
    if said[0] and said[0][-1] not in ".!?)":
        said[0] += "."
    if option.required:
        said.append("Required.")
    if option.multiple and "repeat" not in said[0]:
        said.append("Repeatable.")
    default = option.default
    if isinstance(default, bool):
        if option.secondary_opts:
            said.append(f"Default: ``{(option.opts if default else option.secondary_opts)[0]}``.")
    elif isinstance(default, str | int | float) and default != "":
        said.append(f"Default: ``{default}``.")
    return " ".join(said)


def filled(text: str) -> str:
    """Return a page's text with its comments replaced by what they stand for."""
    text = NAMES.sub(lambda found: name_entries(found[1], found[2]), text)
    return text.replace(COMMANDS, command_entries()) if COMMANDS in text else text
