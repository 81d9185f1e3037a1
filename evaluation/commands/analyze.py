"""Run `kvpolicy analyze`: where attention goes, and what dropping tokens costs by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import attrs

from kvpolicy.evaluation.analysis.settings import AnalysisSettings
from kvpolicy.evaluation.commands.working import work
from kvpolicy.evaluation.options import Option


@attrs.frozen(kw_only=True)
class AnalyzeOptions:
    """The command-line options of `kvpolicy analyze`."""

    settings: AnalysisSettings
    out: Annotated[
        Path | None, Option("Folder to write the numbers and the pictures to.", metavar="DIR")
    ] = None


def analyze(options: AnalyzeOptions) -> None:
    """Show which tokens each layer attends to, and how dropping the others changes the output."""
    work("analyze", options)
