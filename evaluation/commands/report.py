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
            "Folders of results that kvpolicy eval has written for one model; several are joined.",
            metavar="DIR",
            positional=True,
        ),
    ]
    out: Annotated[
        Path | None,
        Option(
            f"HTML page to write; default: {PAGE} in the folder, or here if there are several "
            "folders.",
            ("--out-file",),
            metavar="FILE",
        ),
    ] = None


def report(options: ReportOptions) -> None:
    """Turn folders of results into one self-contained HTML page and a Markdown table.

    Unfinished results are included and marked. Folders from several machines are joined if their
    model and prompts are the same; the page shows how the folders differ.
    """
    work("report", options)
