"""Run `kvpolicy report`: the results of `kvpolicy eval` as a page and a Markdown table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvpolicy.evaluation.suite.folder import load
from kvpolicy.evaluation.suite.report import write_report

PAGE = "report.html"


def report(
    results: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder that kvpolicy eval has written.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help=f"The page; default: {PAGE} in the folder."),
    ] = None,
) -> None:
    """Make one page of a folder of results, which needs no other file, and a Markdown table.

    A folder that is not finished is reported on as far as it is, and marked.
    """
    found = load(results)
    files = write_report(found, results / PAGE if out is None else out)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    expected = sum(found.description.expected.values())
    if len(found.samples) < expected:
        console.print(f"{len(found.samples):,} of {expected:,} samples are finished")
    console.print(f"written: {', '.join(map(str, files))}")
