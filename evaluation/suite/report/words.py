"""Format numbers the same way on the page and in the Markdown table."""

from __future__ import annotations

from collections.abc import Sequence

from kvpolicy.evaluation.comparison.tables import byte_unit
from kvpolicy.evaluation.intervals import Difference
from kvpolicy.evaluation.suite.summary import Figure

MINUS = "\N{MINUS SIGN}"


def signed(points: float) -> str:
    """Format a score difference in percentage points, with its sign.

    Example:
        >>> signed(2.25), signed(-0.01)
        ('+2.2', '0.0')
    """
    written = f"{points:+.1f}"
    return "0.0" if written in ("+0.0", "-0.0") else written.replace("-", MINUS)


def interval(difference: Difference) -> str:
    """Format the 95% interval of a score difference."""
    return f"[{signed(difference.low)}, {signed(difference.high)}]"


def spread(difference: Difference | None) -> str | None:
    """Format a score difference with its 95% interval; None if there is none."""
    if difference is None:
        return None
    return f"{signed(difference.mean)} {interval(difference)}"


def verdict(difference: Difference | None) -> str | None:
    """Return "worse" or "better" if a score difference's interval excludes 0, else None."""
    if difference is None or not difference.clear:
        return None
    return "worse" if difference.mean < 0 else "better"


def percents(metrics: Sequence[str]) -> list[str]:
    """Return the column headings of scores, each with a percent sign."""
    return [f"{metric} %" for metric in metrics]


def unfinished(figure: Figure) -> str:
    """Return text on how many of an unfinished cell's samples are done."""
    if not figure.expected:
        return "not asked"
    return f"{figure.done} of {figure.expected}" if figure.done else "not begun"


def memory(size: float) -> str:
    """Format a number of bytes in a fitting unit.

    Example:
        >>> memory(1_572_864)
        '1.57 MB'
    """
    unit, unit_bytes = byte_unit(round(size))
    return f"{size / unit_bytes:.3g} {unit}"


def duration(seconds: float) -> str:
    """Format a time in seconds, or in milliseconds if below one second.

    Example:
        >>> duration(0.0123), duration(75)
        ('12.3 ms', '75 s')
    """
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def place(length: int | None, question: str) -> str:
    """Describe in words a prompt length, and whether the question is read with the context."""
    tokens = "own length" if length is None else f"{length:,} tokens"
    return f"{tokens}, question {'with the context' if question == 'with' else 'later'}"
