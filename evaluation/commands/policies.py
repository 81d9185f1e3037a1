"""Run `kvpolicy policies`: list every registered method and part."""

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

KINDS = ("policy", "scorer", "selector", "propagation")
_INDENT = " " * 4
_WIDTH = 80


def policies() -> None:
    """List every method and part: name, parameters with defaults, paper, summary."""
    from kvpolicy.evaluation.commands.terminal import plain_console
    from kvpolicy.registry import kind_of, registered

    console = plain_console()
    factories = registered()
    for kind in KINDS:
        console.print(f"{kind}", style="bold")
        for name, factory in factories.items():
            if kind_of(factory) == kind:
                console.print(describe(name, factory))
        console.print()


def describe(name: str, factory: Callable[..., Any]) -> str:
    """Describe a policy or part in lines of text: name, paper, summary and parameters."""
    from kvpolicy.registry import parameters_of

    paper = getattr(factory, "paper", "")
    lines = [f"  {name}" + (f"  ({paper})" if paper else "")]
    parameters = ", ".join(
        key if default is inspect.Parameter.empty else f"{key}={default!r}"
        for key, default in parameters_of(factory).items()
    )
    summary = (inspect.getdoc(factory) or "not described").splitlines()[0]
    for text in (summary, parameters or "no parameters"):
        lines += textwrap.wrap(
            text, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT, break_on_hyphens=False
        )
    return "\n".join(lines)
