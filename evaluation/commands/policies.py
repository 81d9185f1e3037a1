"""Run `kvpolicy policies`: list every registered method and part."""

from __future__ import annotations

from kvpolicy.evaluation.commands.working import work


def policies() -> None:
    """List every method and part: name, parameters with defaults, paper, summary."""
    work("policies")
