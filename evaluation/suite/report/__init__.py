"""Write the report on a folder of results: one page and a Markdown table."""

from __future__ import annotations

from pathlib import Path

from kvpolicy.evaluation.extras import require
from kvpolicy.evaluation.results import check_folder, write_all
from kvpolicy.evaluation.suite.folder import Results
from kvpolicy.evaluation.suite.report.markdown import markdown
from kvpolicy.evaluation.suite.report.page import page

__all__ = ["markdown", "page", "write_report"]


def write_report(results: Results, out: Path) -> list[Path]:
    """Write the HTML report of a folder of results, and a Markdown table beside it.

    Args:
        results: What to report on.
        out: The page's file, such as ``results/report.html``.

    Returns:
        The files.

    Raises:
        ValueError: ``out`` is no name of a page, or cannot be written.
        MissingExtraError: jinja2 is not installed.
    """
    require("jinja2", extra="cli")
    if out.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"out must be a file that ends in .html, got {out}")
    beside = out.with_suffix(".md")
    check_folder(out.parent, (out.name, beside.name))
    write_all(
        out.parent, {out.name: page(results).encode(), beside.name: markdown(results).encode()}
    )
    return [out, beside]
