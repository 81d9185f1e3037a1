"""Print what was kept of a prompt and what was left out, as a table of 80 columns."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from kvpolicy.evaluation.compression.chunks import Chunk
from kvpolicy.evaluation.compression.segments import Segment

WIDTH = 80
# The most rows that a table shows; of a longer one, the middle rows are left out.
MOST_ROWS = 40


def headline(chunks: Sequence[Chunk], before: int, after: int, fixed: int) -> str:
    """Return a line on how many of a prompt's tokens and chunks compression keeps.

    Args:
        chunks: What was chosen among.
        before: Tokens of the prompt.
        after: Tokens of the shorter one.
        fixed: Tokens that are never cut.
    """
    kept = sum(each.kept for each in chunks)
    return (
        f"{before:,} tokens -> {after:,} ({after / before:.1%}): {kept:,} of {len(chunks):,} "
        f"chunks kept\ntokens never cut: {fixed:,}"
    )


def segment_table(segments: Sequence[Segment], chunks: Sequence[Chunk]) -> str:
    """Return a table of the prompt segments kept and left out, at most 80 columns wide.

    Args:
        segments: The prompt.
        chunks: What was chosen among.
    """
    rows = [_row(each, chunks) for each in segments]
    if len(rows) > MOST_ROWS:
        half = MOST_ROWS // 2
        rows = [*rows[:half], f"... {len(rows) - 2 * half:,} more ...", *rows[-half:]]
    head = f"  {'tokens':>17} {'best score':>10}  text"
    return "\n".join(
        [head, *rows, "", "+ kept, - left out; best score: the highest of the chunks in a row."]
    )


def _row(segment: Segment, chunks: Sequence[Chunk]) -> str:
    scores = [
        each.score for each in chunks if segment.start <= each.start and each.end <= segment.end
    ]
    best = f"{max(scores):.3g}" if scores else "-"
    tokens = f"{segment.start:,}-{segment.end - 1:,}"
    head = f"{'+' if segment.kept else '-'} {tokens:>17} {best:>10}  "
    return head + preview(segment.text, WIDTH - len(head))


def preview(text: str, width: int) -> str:
    """Return the beginning and the end of a text on one line.

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
