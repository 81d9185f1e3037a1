"""What was kept of a prompt, and what was left out, as a table for a terminal of 80 columns."""

from __future__ import annotations

import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpolicy.evaluation.compression.compressed import CompressedPrompt, Segment

WIDTH = 80
# Rows of a table that somebody still reads; the middle ones are left out.
MOST_ROWS = 40


def report(compressed: CompressedPrompt) -> str:
    """The numbers, and a row for each stretch that is kept or left out.

    Args:
        compressed: The prompt.

    Returns:
        Lines of at most 80 columns, but for the one that says what chose.
    """
    before, after = compressed.tokens_before, compressed.tokens_after
    chunks = compressed.chunks
    kept = sum(each.kept for each in chunks)
    rows = [_row(compressed, each) for each in compressed.segments]
    if len(rows) > MOST_ROWS:
        half = MOST_ROWS // 2
        rows = [*rows[:half], f"... {len(rows) - 2 * half:,} more ...", *rows[-half:]]
    return "\n".join(
        [
            f"{before:,} tokens -> {after:,} ({after / before:.1%}): {kept:,} of {len(chunks):,} "
            "chunks kept",
            f"tokens never cut: {compressed.tokens_fixed:,}",
            f"scored by {compressed.source}",
            "",
            f"  {'tokens':>17} {'best score':>10}  text",
            *rows,
            "",
            "+ kept, - left out; best score: of the chunks there.",
        ]
    )


def _row(compressed: CompressedPrompt, segment: Segment) -> str:
    scores = [
        each.score
        for each in compressed.chunks
        if segment.start <= each.start and each.end <= segment.end
    ]
    best = f"{max(scores):.3g}" if scores else "-"
    tokens = f"{segment.start:,}-{segment.end - 1:,}"
    head = f"{'+' if segment.kept else '-'} {tokens:>17} {best:>10}  "
    return head + preview(segment.text, WIDTH - len(head))


def preview(text: str, width: int) -> str:
    """A text's beginning and end on one line.

    Args:
        text: The text; white space and what cannot be printed become single spaces.
        width: Columns there are, of which wide characters take two.

    Example:
        >>> preview("one two three four five", 15)
        'one two ...five'
    """
    shown = "".join(each if each.isprintable() else " " for each in text)
    shown = " ".join(shown.split())
    if _columns(shown) <= width:
        return shown
    head, tail = "", ""
    for each in shown:
        if _columns(head + each) > (width - 3) * 2 // 3:
            break
        head += each
    for each in reversed(shown):
        if _columns(head + each + tail) + 3 > width:
            break
        tail = each + tail
    return f"{head}...{tail}"


def _columns(text: str) -> int:
    wide = sum(unicodedata.east_asian_width(each) in "WF" for each in text)
    return len(text) + wide - sum(unicodedata.combining(each) > 0 for each in text)
