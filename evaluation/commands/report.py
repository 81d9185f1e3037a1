"""Run `kvpolicy report`: the results of `kvpolicy eval` as a page and a Markdown table."""

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
        Path, Option("A folder that kvpolicy eval has written.", metavar="DIR", positional=True)
    ]
    out: Annotated[
        Path | None,
        Option(
            f"The page; default: {PAGE} in the folder.",
            ("--out-file",),
            metavar="FILE",
            earlier="--out",
        ),
    ] = None


def report(options: ReportOptions) -> None:
    """Turn a folder of results into one self-contained HTML page and a Markdown table.

    A folder that is not finished is reported on as far as it is, and marked.
    """
    work("report", options)
