"""Fill the pages of docs/reference from the package, when the site is built.

A page holds a comment where what is generated goes:

- ``<!-- public names: MODULE -->``: all names in the module's ``__all__``, with their docstrings;
- ``<!-- public names: MODULE, defined in: MODULE -->``: those of them that the second module or one
  below it defines;
- ``<!-- commands -->``: every command of ``kvpolicy`` with its options, from its parser.
"""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

NAMES = re.compile(r"^<!-- public names: ([\w.]+)(?:, defined in: ([\w.]+))? -->$", re.MULTILINE)
COMMANDS = "<!-- commands -->"


def names_in(module: str, defined_in: str | None) -> list[str]:
    """Return the names in a module's ``__all__``, or those that another module defines."""
    package = importlib.import_module(module)
    return [
        name
        for name in package.__all__
        if defined_in is None
        or f"{getattr(package, name).__module__}.".startswith(f"{defined_in}.")
    ]


def name_entries(module: str, defined_in: str | None) -> str:
    """Return the MyST text that shows the names of a module with their docstrings."""
    lines = ["```{eval-rst}", f".. currentmodule:: {module}", ""]
    for name in names_in(module, defined_in):
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
    said = [(option.help or "").replace("*", r"\*").rstrip()]
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


def fill(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace the comments of a page by what they stand for."""
    if not page.startswith("reference/"):
        return
    text = NAMES.sub(lambda found: name_entries(found[1], found[2]), source[0])
    source[0] = text.replace(COMMANDS, command_entries()) if COMMANDS in text else text


def link_public_name(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, content: nodes.Element
) -> nodes.Element | None:
    """Link a name in backticks to the one public name that ends with it, if there is one."""
    if node.get("refdomain") != "py" or node.get("reftype") != "obj":
        return None
    target = node["reftarget"].removesuffix("()")
    python: Any = env.get_domain("py")
    found = [name for name in python.objects if name.endswith(f".{target}")]
    shortest = [name for name in found if name.count(".") == min(it.count(".") for it in found)]
    if len(shortest) != 1 or not target[:1].isupper():
        return None
    entry = python.objects[shortest[0]]
    address = app.builder.get_relative_uri(node["refdoc"], entry.docname)
    link = nodes.reference("", "", internal=True, refuri=f"{address}#{entry.node_id}")
    link += content
    return link


def setup(app: Sphinx) -> dict[str, bool]:
    """Register what fills pages and links names."""
    app.connect("source-read", fill)
    app.connect("missing-reference", link_public_name)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
