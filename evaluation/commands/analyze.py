"""Run `kvpolicy analyze`: where attention goes, and what dropping tokens costs by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import attrs

from kvpolicy.evaluation.analysis.settings import AnalysisSettings
from kvpolicy.evaluation.commands.working import work
from kvpolicy.evaluation.options import Option, check_scorers


@attrs.frozen(kw_only=True)
class AnalyzeOptions:
    """The command-line options of `kvpolicy analyze`.

    Raises:
        ValueError: An option of ``--oracle`` is given without it, or a scorer is unknown.
    """

    settings: AnalysisSettings
    oracle: Annotated[
        bool,
        Option(
            "Instead, measure how well scorers rank the tokens that the model's answer attends to."
        ),
    ] = False
    scorers: Annotated[
        tuple[str, ...],
        Option(
            "With --oracle, a scorer to compare: a name, or name:parameter=value,...; "
            "repeatable; default: all registered.",
            ("--scorer",),
            metavar="PART",
        ),
    ] = ()
    answer_tokens: Annotated[
        int | None, Option("With --oracle, largest number of answer tokens; default 256.", min=1)
    ] = None
    pool: Annotated[
        int | None,
        Option(
            "With --oracle, width (odd) of the pooling of the answer's attention; default 13.",
            ("--kernel-size",),
            min=1,
        ),
    ] = None
    out: Annotated[
        Path | None, Option("Folder to write the numbers and the pictures to.", metavar="DIR")
    ] = None

    def __attrs_post_init__(self) -> None:
        for option, value in (
            ("--scorer", self.scorers),
            ("--answer-tokens", self.answer_tokens),
            ("--kernel-size", self.pool),
        ):
            if value and not self.oracle:
                raise ValueError(
                    f"{option} may be given only with --oracle; add --oracle, or leave out {option}"
                )
        check_scorers(self.scorers)


def analyze(options: AnalyzeOptions) -> None:
    """Show which tokens each layer attends to, and how dropping the others changes the output."""
    work("analyze", options)
