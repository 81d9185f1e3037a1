"""Do the work of `kvpolicy check`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kvpolicy.evaluation.commands.check import CheckOptions
from kvpolicy.evaluation.commands.terminal import load_shown
from kvpolicy.evaluation.refusals import in_users_words
from kvpolicy.registry import build, registered

if TYPE_CHECKING:
    from kvpolicy.integrations.transformers.checking import ModelCheck

_WIDTH = 80


def run_check(options: CheckOptions) -> None:
    """Do what `kvpolicy check` does."""
    from kvpolicy.integrations.transformers.checking import check_model

    loaded = load_shown(options.model, dtype=options.dtype, device=options.device)
    found = check_model(loaded.model)
    console = Console(highlight=False, markup=False, width=_WIDTH)
    console.print(f"{found.name} ({found.model_type})", style="bold")
    for kind, count in found.kind_counts.items():
        console.print(f"  {count} layer{'s' * (count != 1)} of {kind}")
    for name, finding in found.findings.items():
        said = (
            f"off by {finding.error:.1e}; the hidden tokens change the logits by "
            f"{finding.effect:.1e}"
        )
        console.print(f"  self-check, {name}: {said if finding.reason is None else 'failed'}")
    if not found.shows_queries:
        console.print("  attention shows no queries: policies that read queries cannot be applied")
    if not found.pads:
        console.print(
            "  rows must not be padded: the model reads padded rows differently, with any cache"
        )
    console.print(_table(found, options.context))
    if found.refusal is not None:
        raise typer.Exit(1)


def _table(found: ModelCheck, context: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=f"at {context:,} tokens", title_justify="left")
    table.add_column("policy", no_wrap=True)
    table.add_column("can be applied")
    for name in registered("policy"):
        reason = refusal(found, name, context)
        table.add_row(name, "yes" if reason is None else f"no: {reason}")
    return table


def refusal(found: ModelCheck, name: str, context: int) -> str | None:
    """Return a sentence on why a registered policy cannot be used; None if it can.

    Errors write policies and their parts as Python does. Here they are the name that is registered.

    Args:
        found: What is known of the model.
        name: The policy's.
        context: Tokens of the context.
    """
    policy: Any = None
    try:
        policy = build(name)
        reason = found.refusal_of(policy, context)
    except (TypeError, ValueError) as error:  # another package's class may need arguments
        reason = str(error)
    return None if reason is None else in_users_words(reason, policy, name)
