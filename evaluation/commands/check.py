"""Run `kvpolicy check`: which policies can be applied to a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpolicy.evaluation.commands import shared
from kvpolicy.evaluation.commands.shared import option

if TYPE_CHECKING:
    from kvpolicy.integrations.transformers.checking import ModelCheck

_WIDTH = 80


def check(
    *,
    model: Annotated[
        str | None,
        typer.Argument(
            callback=shared.checked_model,
            metavar="MODEL",
            help="The model: a folder or a Hub name; default: SmolLM2-135M-Instruct.",
        ),
    ] = None,
    context: Annotated[
        int | None,
        option(
            "N", "Number of context tokens to check for; default: the model's positions.", min=1
        ),
    ] = None,
    self_check: Annotated[
        bool, option(None, "Run the self-check also for a tested type of model.", "--self-check")
    ] = False,
    dtype: shared.Dtype = "auto",
    device: shared.Device = "cpu",
) -> None:
    """Show a model's layers, and which policies cannot be applied to it, and why.

    A model whose type the tests of kvpolicy do not cover reads a few dozen tokens under a policy
    that evicts keys and values, and under one that drops tokens. The logits are compared with those
    of the model's own dense attention. The exit status is 1 if no policy can be applied.
    """
    from rich.console import Console

    from kvpolicy.evaluation.commands.terminal import load_shown
    from kvpolicy.evaluation.readable import positions_notes, positions_of
    from kvpolicy.integrations.transformers.checking import check_model
    from kvpolicy.registry import registered

    loaded = load_shown(model, dtype=dtype, device=device)
    found = check_model(loaded.model, always=self_check)
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
    if found.refusal is None and not found.findings:
        console.print("  kvpolicy's tests cover this type; --self-check checks this model too")
    if not found.shows_queries:
        console.print("  attention shows no queries: policies that read queries cannot be applied")
    if not found.pads:
        console.print(
            "  rows must not be padded: the model reads padded rows differently, with any cache"
        )
    length = context or positions_of(loaded.model) or 32768
    reasons = {name: refusal(found, name, length) for name in registered("policy")}
    console.print()
    for line in [*_lines(reasons, length), *positions_notes(loaded.model, length)]:
        console.print(line)
    if found.refusal is not None:
        raise typer.Exit(1)


def _lines(reasons: dict[str, str | None], context: int) -> list[str]:
    """Say which policies can be applied, and give the reason for each other, a line each."""
    can = [name for name, reason in reasons.items() if reason is None]
    at = f"at {context:,} tokens"
    if len(can) == len(reasons):
        return [f"All {len(can)} policies can be applied {at}."]
    said = f"{len(can)} of {len(reasons)} policies can be applied {at}"
    lines = [f"{said}: {', '.join(can)}." if can else f"No policy can be applied {at}."]
    refused: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        if reason is not None:
            refused.setdefault(reason.replace(name, "it"), []).append(name)
    lines += [f"\nNot {', '.join(names)}: {reason}" for reason, names in refused.items()]
    return lines


def refusal(found: ModelCheck, name: str, context: int) -> str | None:
    """Return a sentence on why a registered policy cannot be used; None if it can."""
    from kvpolicy.evaluation.variant import in_users_words
    from kvpolicy.registry import build

    policy: Any = None
    try:
        policy = build(name)
        reason = found.refusal_of(policy, context)
    except (TypeError, ValueError) as error:  # another package's class may need arguments
        reason = str(error)
    return None if reason is None else in_users_words(reason, policy, name)
