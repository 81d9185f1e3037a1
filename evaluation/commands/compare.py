"""Run `kvpolicy compare`: policies side by side on prompts with known answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import attrs

from kvpolicy.evaluation.commands.working import work
from kvpolicy.evaluation.comparison.settings import Settings
from kvpolicy.evaluation.options import Option


@attrs.frozen(kw_only=True)
class CompareOptions:
    """The command-line options of `kvpolicy compare`."""

    settings: Settings
    out: Annotated[
        Path | None, Option("Folder for compare.json and the pictures.", metavar="DIR")
    ] = None


def compare(options: CompareOptions) -> None:
    """Compare policies with full context: accuracy, memory and speed.

    By default eleven policies and full context, each keeping 2% and 5% of a prompt's tokens.
    --all compares every policy; --thorough every policy at 2%, 10% and 20%, on more prompts.
    """
    work("compare", options)
