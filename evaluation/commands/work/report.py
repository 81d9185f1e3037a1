"""Do the work of `kvpolicy report`."""

from __future__ import annotations

from pathlib import Path

from kvpolicy.evaluation.commands.report import PAGE, ReportOptions
from kvpolicy.evaluation.commands.terminal import plain_console
from kvpolicy.evaluation.suite.joining import differences, load_joined
from kvpolicy.evaluation.suite.report import write_report


def run_report(options: ReportOptions) -> None:
    """Do what `kvpolicy report` does."""
    folders = options.results
    found = load_joined(folders)
    own = folders[0] / PAGE if len(folders) == 1 else Path(PAGE)
    files = write_report(found, options.out or own)
    console = plain_console()
    expected = sum(found.description.expected.values())
    if len(found.samples) < expected:
        console.print(f"{len(found.samples):,} of {expected:,} samples are finished")
    for each in differences(found.sources):
        console.print(f"differs: {each}")
    console.print(f"written: {', '.join(map(str, files))}")
