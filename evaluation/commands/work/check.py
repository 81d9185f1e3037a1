"""Do the work of `kvpolicy check`."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kvpolicy.evaluation.commands.check import CheckOptions
from kvpolicy.evaluation.commands.work.terminal import load_shown
from kvpolicy.registry import build, registered

_WIDTH = 80


def run_check(options: CheckOptions) -> None:
    """Do what `kvpolicy check` does."""
    from kvpolicy.integrations.transformers.checking import check_model

    loaded = load_shown(options)
    found = check_model(loaded.model)
    console = Console(highlight=False, markup=False, width=_WIDTH)
    console.print(f"{found.name} ({found.model_type})", style="bold")
    for kind, count in found.kind_counts.items():
        console.print(f"  {count} layers of {kind}")
    for name, finding in found.findings.items():
        said = f"off by {finding.error:.1e}, where what is not seen is worth {finding.effect:.1e}"
        console.print(f"  self-check, {name}: {said if finding.reason is None else 'failed'}")
    if not found.shows_queries:
        console.print("  attention shows no queries: policies that look at them cannot be applied")
    if not found.pads:
        console.print("  rows must not be padded: the model itself reads them otherwise then")
    console.print(_table(found, options.context))
    if found.refusal is not None:
        raise typer.Exit(1)


def _table(found: Any, context: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=f"at {context:,} tokens", title_justify="left")
    table.add_column("policy", no_wrap=True)
    table.add_column("can be applied")
    for name in registered("policy"):
        try:
            reason = found.refusal_of(build(name), context)
        except (TypeError, ValueError) as error:  # one of another package may need arguments
            reason = str(error)
        table.add_row(name, "yes" if reason is None else "no: " + _sentence(reason))
    return table


def _sentence(reason: str) -> str:
    """Return a reason with classes named, not as Python writes their objects: without ``()``."""
    return textwrap.shorten(re.sub(r"\b(\w+)\(\)", r"\1", reason), 300)
