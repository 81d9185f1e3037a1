"""Do the work of `kvpolicy report`."""

from __future__ import annotations

from kvpolicy.evaluation.commands.report import PAGE, ReportOptions
from kvpolicy.evaluation.commands.work.terminal import plain_console
from kvpolicy.evaluation.suite.folder import load
from kvpolicy.evaluation.suite.report import write_report


def run_report(options: ReportOptions) -> None:
    """Do what `kvpolicy report` does."""
    found = load(options.results)
    files = write_report(found, options.out or options.results / PAGE)
    console = plain_console()
    expected = sum(found.description.expected.values())
    if len(found.samples) < expected:
        console.print(f"{len(found.samples):,} of {expected:,} samples are finished")
    console.print(f"written: {', '.join(map(str, files))}")
