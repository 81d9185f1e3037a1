"""Tokenize a prompt: find each token's place in the text, and mark those that may be cut."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import attrs

from kvpolicy.evaluation.compression.chat import Rendered, Span

# How good it is to cut the text at a border between two tokens.
INSIDE_CHARACTER, BETWEEN_TOKENS, BETWEEN_WORDS, BETWEEN_LINES = range(4)


@attrs.frozen
class Tokens:
    """A prompt's tokens, with where each starts in the text and whether it may be cut.

    Args:
        text: The text.
        ids: The tokens.
        starts: For each token the character it starts at, and at last the text's length: token
            ``i`` stands for the characters from ``starts[i]`` to ``starts[i + 1]``, so that all
            tokens together are the text. None where the tokenizer does not tell.
        borders: For each token how good the border before it is, `INSIDE_CHARACTER` to
            `BETWEEN_LINES`.
        fixed: For each token whether it is never cut.
    """

    text: str
    ids: tuple[int, ...]
    starts: tuple[int, ...] | None
    borders: tuple[int, ...]
    fixed: tuple[bool, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def characters(self, start: int, end: int) -> Span | None:
        """Return the text of tokens ``start`` to ``end``; None if it is unknown."""
        return None if self.starts is None else (self.starts[start], self.starts[end])


def tokens_of(
    tokenizer: Any, rendered: Rendered, kept: Sequence[Span], *, cut_special: bool = False
) -> Tokens:
    """Tokenize a rendered prompt, and mark tokens of template and protected texts as never cut.

    Args:
        tokenizer: A tokenizer of Transformers.
        rendered: The prompt.
        kept: Characters of it that are never cut.
        cut_special: Whether special tokens within contents may be cut.

    Raises:
        ValueError: Characters matter, but the tokenizer does not tell which ones tokens stand for.
    """
    if not getattr(tokenizer, "is_fast", False):
        whole = rendered.contents == ((0, len(rendered.text)),)
        if kept or not whole:
            raise ValueError(
                "tokenizer must tell which characters belong to each token, since parts of the "
                f"prompt are kept or it is a chat, but {type(tokenizer).__name__} does not; take "
                "a model with a fast tokenizer, or give a plain prompt"
            )
        ids = tuple(tokenizer.encode(rendered.text, add_special_tokens=rendered.special))
        special = _special_ids(tokenizer)
        alone = tuple(not cut_special and each in special for each in ids)
        return Tokens(rendered.text, ids, None, (BETWEEN_TOKENS,) * len(ids), alone)
    encoded = tokenizer(
        rendered.text, add_special_tokens=rendered.special, return_offsets_mapping=True
    )
    ids, offsets = tuple(encoded["input_ids"]), encoded["offset_mapping"]
    starts, borders = _placed(rendered.text, offsets)
    fixed = _fixed(rendered, starts, kept)
    special = set() if cut_special else _special_ids(tokenizer)
    added = (end <= start for start, end in offsets)  # by the tokenizer: they have no text
    flags = zip(fixed, added, (each in special for each in ids), strict=True)
    return Tokens(rendered.text, ids, tuple(starts), tuple(borders), tuple(map(any, flags)))


def _special_ids(tokenizer: Any) -> set[int]:
    """Return the tokenizer's special token ids, except the one for unknown words."""
    return set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}


def _placed(text: str, offsets: Sequence[Span]) -> tuple[list[int], list[int]]:
    """Return where each token starts in the text, and what kind of border is before it."""
    starts: list[int] = []
    borders: list[int] = []
    covered = 0  # the end of the tokens before
    for start, end in offsets:
        empty = end <= start
        # Several tokens can make one character; then all but the last of them are empty.
        inside = not empty and start < covered
        here = covered if empty else max(start, starts[-1] if starts else 0)
        starts.append(here)
        borders.append(INSIDE_CHARACTER if inside else _border(text, here))
        covered = covered if empty else max(covered, end)
    if starts:
        starts[0] = 0  # white space that a tokenizer strips off
    return [*starts, len(text)], borders


def _border(text: str, at: int) -> int:
    if not 0 < at < len(text):
        return BETWEEN_LINES
    if text[at - 1] in "\r\n" and text[at] not in "\r\n":
        return BETWEEN_LINES
    between = text[at - 1].isspace() or text[at].isspace()
    return BETWEEN_WORDS if between else BETWEEN_TOKENS


def _fixed(rendered: Rendered, starts: Sequence[int], kept: Sequence[Span]) -> list[bool]:
    """Return a flag for each token: whether it is never cut, as template or protected text."""
    counts = [0] * (len(rendered.text) + 1)
    for start, end in (*_between(rendered), *kept):
        for at in range(start, end):
            counts[at] = 1
    sums = list(itertools.accumulate(counts, initial=0))
    return [sums[end] > sums[start] for start, end in itertools.pairwise(starts)]


def _between(rendered: Rendered) -> list[Span]:
    """Return the character spans of the chat template: those between messages' contents."""
    edges = [0, *itertools.chain.from_iterable(rendered.contents), len(rendered.text)]
    return list(zip(edges[::2], edges[1::2], strict=True))
