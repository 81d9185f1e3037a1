"""Divide tokens into chunks of neighbours, and choose the chunks to keep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby, pairwise

import attrs
import torch

from kvpolicy.evaluation.compression.scoring import PromptSaliency
from kvpolicy.evaluation.compression.tokens import (
    BETWEEN_LINES,
    BETWEEN_TOKENS,
    BETWEEN_WORDS,
    INSIDE_CHARACTER,
    Tokens,
)
from kvpolicy.evaluation.defaults import ALIGNMENT_NAMES
from kvpolicy.selection import ranks, select_top

ALIGNMENTS = dict(zip(ALIGNMENT_NAMES, (BETWEEN_LINES, BETWEEN_WORDS, BETWEEN_TOKENS), strict=True))


@attrs.frozen
class Chunk:
    """A run of neighbouring prompt tokens that compression keeps or cuts as a whole.

    Args:
        start: Its first token.
        end: The token behind its last.
        score: Mean saliency of its tokens.
        always: Whether it is kept whatever its score.
        kept: Whether it is kept.
    """

    start: int
    end: int
    score: float
    always: bool
    kept: bool

    def __len__(self) -> int:
        return self.end - self.start


def divide(tokens: Tokens, chunk_size: int, align: str) -> list[tuple[int, int]]:
    """Divide a prompt's cuttable tokens into chunks that end at line or word borders.

    Each run of such tokens is divided by itself. A chunk has ``chunk_size`` tokens and as many more
    as the next line or word takes to begin, at most as many again; where none begins, the next best
    border serves. A rest of less than half a chunk goes with the chunk before it.

    Args:
        tokens: The tokens.
        chunk_size: Tokens of a chunk, at least 1.
        align: A name of `ALIGNMENTS`: where a chunk may end.

    Returns:
        First token and the one behind the last, of each, ascending.
    """
    chunks = []
    for fixed, run in groupby(range(len(tokens)), key=lambda at: tokens.fixed[at]):
        if fixed:
            continue
        at, *others = run
        end = others[-1] + 1 if others else at + 1
        while at < end:
            border = _next_border(tokens.borders, at + chunk_size, end, chunk_size, align)
            border = end if 2 * (end - border) < chunk_size else border
            chunks.append((at, border))
            at = border
    return chunks


def _next_border(borders: Sequence[int], first: int, end: int, reach: int, align: str) -> int:
    if first >= end:
        return end
    near = range(first, min(first + reach, end))
    for wanted in range(ALIGNMENTS[align], INSIDE_CHARACTER, -1):
        for at in near:
            if borders[at] >= wanted:
                return at
    # A character may have more tokens than a chunk; the chunk then ends inside it.
    return next((at for at in range(near.stop, end) if borders[at] > INSIDE_CHARACTER), end)


def choose(
    tokens: Tokens,
    spans: Sequence[tuple[int, int]],
    saliency: PromptSaliency,
    *,
    rate: float | None,
    budget: int | None,
) -> list[Chunk]:
    """Choose the chunks of highest score to keep; the first and the last chunk are always kept.

    Args:
        tokens: The prompt's.
        spans: `divide`'s.
        saliency: Of all tokens.
        rate: Of the chunks, the fraction that is kept, rounded up; None where ``budget`` is given.
        budget: Tokens that are kept at most, those that are never cut included: chunks are taken
            from the best on for as long as they fit.

    Raises:
        ValueError: What is always kept does not fit the budget.
    """
    if not spans:
        return []
    scores = torch.stack([saliency.values[start:end].double().mean() for start, end in spans])
    scored_end = len(tokens) - saliency.unscored_tail
    last = len(spans) - 1
    always = torch.tensor([i in (0, last) or spans[i][1] > scored_end for i in range(len(spans))])
    if rate is not None:
        # 0.07 * 100 is a little more than 7 in floating point.
        count = max(math.ceil(round(rate * len(spans), 9)), int(always.sum()))
    else:
        assert budget is not None
        count = _fitting(tokens, spans, scores, always, budget)
    kept = select_top(
        scores[None, None],
        [count],
        valid=torch.ones_like(always)[None, None],
        protected=always[None, None],
    )
    chosen = set(kept.flatten().tolist())
    return [
        Chunk(*span, score, fixed, index in chosen)
        for index, (span, score, fixed) in enumerate(
            zip(spans, scores.tolist(), always.tolist(), strict=True)
        )
    ]


def _fitting(
    tokens: Tokens,
    spans: Sequence[tuple[int, int]],
    scores: torch.Tensor,
    always: torch.Tensor,
    budget: int,
) -> int:
    """Return how many of the best chunks fit into a budget of tokens."""
    sizes = torch.tensor([end - start for start, end in spans])
    required = sum(tokens.fixed) + int(sizes[always].sum())
    if required > budget:
        raise ValueError(
            f"tokens must be at least {required}, the {sum(tokens.fixed)} tokens that are never "
            f"cut with the first and the last chunk, got {budget}; raise it, keep less or take "
            "smaller chunks"
        )
    order = ranks(scores, ~always).argsort()[: int((~always).sum())]
    totals = required + sizes[order].cumsum(0)
    return int(always.sum()) + int((totals <= budget).sum())


def kept_tokens(tokens: Tokens, chunks: Sequence[Chunk]) -> list[bool]:
    """Return a flag for each prompt token: whether it is kept in the shortened prompt."""
    kept = list(tokens.fixed)
    for chunk in chunks:
        kept[chunk.start : chunk.end] = [chunk.kept] * len(chunk)
    return kept


def runs(flags: Sequence[bool]) -> list[tuple[int, int, bool]]:
    """Group equal neighbouring flags; return each group's start, exclusive end and value.

    Example:
        >>> runs([True, True, False, True])
        [(0, 2, True), (2, 3, False), (3, 4, True)]
    """
    edges = [0, *(i for i in range(1, len(flags)) if flags[i] != flags[i - 1]), len(flags)]
    return [(start, end, flags[start]) for start, end in pairwise(edges) if end > start]
