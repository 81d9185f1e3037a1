"""Run `kvpolicy check`: which policies can be applied to a model."""

from __future__ import annotations

from typing import Annotated

import attrs

from kvpolicy.evaluation.commands.working import work
from kvpolicy.evaluation.options import MODEL, LoadingOptions, Option


@attrs.frozen(kw_only=True)
class CheckOptions(LoadingOptions):
    """The command-line options of `kvpolicy check`."""

    model: Annotated[str, Option(MODEL, metavar="MODEL", positional=True)]
    context: Annotated[int, Option("Number of context tokens to check for.", min=1)] = 32768


def check(options: CheckOptions) -> None:
    """Show a model's layers, which policies can be applied to it, and why others cannot.

    The model reads a few dozen tokens under a policy that evicts keys and values, and under one
    that drops tokens. The logits are compared with those of the model's own dense attention. The
    exit status is 1 if no policy can be applied.
    """
    work("check", options)
