"""Divide a prompt into segments that are kept or left out, as text and as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from kvpolicy.evaluation.compression.chat import Span
from kvpolicy.evaluation.compression.chunks import runs
from kvpolicy.evaluation.compression.tokens import Tokens


@attrs.frozen
class Segment:
    """A stretch of a prompt's text that is kept or left out.

    Args:
        start: Its first token.
        end: The token behind its last.
        text: Its text: of the prompt, or of its tokens where the tokenizer tells no characters.
        characters: Where that text is in the prompt that the model reads; None where the tokenizer
            does not tell.
        kept: Whether it is kept.
    """

    start: int
    end: int
    text: str
    characters: tuple[int, int] | None
    kept: bool

    def __len__(self) -> int:
        return self.end - self.start


def segments_of(
    tokenizer: Any, tokens: Tokens, kept: Sequence[bool], *, glue: bool
) -> tuple[Segment, ...]:
    """Divide a prompt into segments that are kept and left out in alternation.

    Args:
        tokenizer: What has made the tokens.
        tokens: The prompt.
        kept: For each token whether it is kept.
        glue: Whether kept texts directly follow each other. Where two words would
            become one, the white space behind the first is then kept with it.
    """
    pieces = runs(kept)
    if tokens.starts is None:
        return tuple(
            Segment(start, end, tokenizer.decode(list(tokens.ids[start:end])), None, flag)
            for start, end, flag in pieces
        )
    edges = [tokens.starts[start] for start, _, _ in pieces] + [len(tokens.text)]
    for index in range(1, len(pieces) - 1):
        here, following = edges[index], edges[index + 1]
        if not glue or pieces[index][2] or not 0 < here < following < len(tokens.text):
            continue
        joined = tokens.text[here - 1] + tokens.text[following]
        if not any(each.isspace() for each in joined) and tokens.text[here].isspace():
            edges[index] += 1
    return tuple(
        Segment(start, end, tokens.text[first:last], (first, last), flag)
        for (start, end, flag), first, last in zip(pieces, edges, edges[1:], strict=False)
    )


def shortened(segments: Sequence[Segment], span: Span, gap: str) -> str:
    """Return part of a prompt's text with a marker in place of what is left out.

    Args:
        segments: The prompt.
        span: The part's characters; without meaning where the tokenizer tells none, of a prompt
            that is all one part.
        gap: The text in place of what was left out.
    """
    pieces = []
    for each in segments:
        text = each.text
        if each.characters is not None:
            first = each.characters[0]
            text = text[max(span[0] - first, 0) : max(span[1] - first, 0)]
        if text:
            pieces.append(text if each.kept else gap)
    return "".join(pieces)


def shorter_ids(
    tokenizer: Any, tokens: Tokens, segments: Sequence[Segment], gap: str
) -> tuple[int, ...]:
    """Return the kept tokens' ids, with a marker's ids wherever tokens are left out."""
    between = tuple(tokenizer.encode(gap, add_special_tokens=False)) if gap else ()
    return tuple(
        token
        for each in segments
        for token in (tokens.ids[each.start : each.end] if each.kept else between)
    )
