"""Run `kvpolicy report`: results of `kvpolicy eval` as a page and a Markdown table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import attrs

from kvpolicy.evaluation.commands.working import work
from kvpolicy.evaluation.options import Option

PAGE = "report.html"


@attrs.frozen(kw_only=True)
class ReportOptions:
    """The command-line options of `kvpolicy report`."""

    results: Annotated[
        tuple[Path, ...],
        Option(
            "Folders that kvpolicy eval has written, of one model; several are joined.",
            metavar="DIR",
            positional=True,
        ),
    ]
    out: Annotated[
        Path | None,
        Option(
            f"The page; default: {PAGE} in the folder; of several: here.",
            ("--out-file",),
            metavar="FILE",
            earlier="--out",
        ),
    ] = None


def report(options: ReportOptions) -> None:
    """Turn folders of results into one self-contained HTML page and a Markdown table.

    What is not finished is reported on as far as it is, and marked. Folders of several machines are
    joined where the model and the prompts are the same; the page says in what they differ.
    """
    work("report", options)
