"""Chunks, and the choice among them: against a slow reference, and as properties."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.evaluation.compression.chunks import Chunk, choose, divide, kept_tokens, runs
from kvpolicy.evaluation.compression.scoring import PromptSaliency
from kvpolicy.evaluation.compression.tokens import Tokens


def tokens(borders: list[int], fixed: list[bool] | None = None) -> Tokens:
    count = len(borders)
    flags = tuple(fixed or [False] * count)
    return Tokens("x" * count, (7,) * count, tuple(range(count + 1)), tuple(borders), flags)


def saliency(values: list[float], tail: int = 0) -> PromptSaliency:
    return PromptSaliency(torch.tensor(values, dtype=torch.float64), "test", tail)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[Tokens, PromptSaliency, int, str]:
    count = draw(st.integers(1, 70))
    borders = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    fixed = draw(st.lists(st.integers(0, 9).map(lambda x: x == 0), min_size=count, max_size=count))
    values = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))  # with ties
    tail = draw(st.sampled_from([0, 0, 3]))
    size, align = draw(st.integers(1, 12)), draw(st.sampled_from(["line", "word", "token"]))
    return tokens(borders, fixed), saliency([float(x) for x in values], tail), size, align


def slow_choice(
    spans: list[tuple[int, int]], values: list[float], count: int, scored: int
) -> set[int]:
    """One chunk after the other: those that are always kept, then the best that is left."""
    exact = [
        sum(map(Fraction, values[start:end]), Fraction()) / (end - start) for start, end in spans
    ]
    taken = {0, len(spans) - 1} | {i for i, (_, end) in enumerate(spans) if end > scored}
    while len(taken) < count:
        best = None
        for index, score in enumerate(exact):
            if index not in taken and (best is None or score > exact[best]):
                best = index
        assert best is not None
        taken.add(best)
    return taken


def test_division_by_hand() -> None:
    assert divide(tokens([1] * 10), 4, "token") == [(0, 4), (4, 8), (8, 10)]
    assert divide(tokens([1] * 9), 4, "token") == [(0, 4), (4, 9)]  # one of 4 is less than half
    assert divide(tokens([1] * 3), 4, "token") == [(0, 3)]
    words = [2, 1, 1, 1, 1, 2, 1, 1, 1, 1, 1, 1, 1, 1, 2, 1, 1]
    # The word at 5; from there none begins within 9 to 12, so that it ends between tokens.
    assert divide(tokens(words), 4, "word") == [(0, 5), (5, 9), (9, 14), (14, 17)]
    lines = [3, 1, 2, 1, 2, 3, 1, 1, 2, 1, 1, 1]
    assert divide(tokens(lines), 3, "line") == [(0, 5), (5, 8), (8, 12)]
    assert divide(tokens([3, 0, 0, 0, 0, 0, 0, 1, 1, 1]), 2, "word") == [(0, 7), (7, 9), (9, 10)]


def test_what_is_fixed_divides() -> None:
    fixed = [True, False, False, False, True, True, False, False]
    assert divide(tokens([1] * 8, fixed), 2, "token") == [(1, 3), (3, 4), (6, 8)]


@given(prompts())
def test_chunks_cover_what_may_be_cut(given: tuple[Tokens, PromptSaliency, int, str]) -> None:
    read, _, size, align = given
    spans = divide(read, size, align)
    covered = [at for start, end in spans for at in range(start, end)]
    assert covered == [at for at, fixed in enumerate(read.fixed) if not fixed]
    for start, end in spans:
        at_edge = end == len(read) or read.fixed[end]
        assert at_edge or read.borders[end] > 0
        assert end > start
        if not at_edge:
            assert end - start >= size
        if all(read.borders[at] > 0 for at in range(start + 1, end)):
            assert end - start < 2 * size + size / 2


@given(prompts(), st.sampled_from([0.1, 0.2, 0.3, 0.5, 0.7, 1.0]))
def test_a_rate_of_the_chunks(given: tuple[Tokens, PromptSaliency, int, str], rate: float) -> None:
    read, scored, size, align = given
    spans = divide(read, size, align)
    chunks = choose(read, spans, scored, rate=rate, budget=None)
    if not spans:
        assert chunks == []
        return
    count = math.ceil(Fraction(str(rate)) * len(spans))
    want = slow_choice(spans, scored.values.tolist(), count, len(read) - scored.unscored_tail)
    assert {i for i, each in enumerate(chunks) if each.kept} == want
    assert [(each.start, each.end) for each in chunks] == spans
    kept = kept_tokens(read, chunks)
    inside = {at for each in chunks if each.kept for at in range(each.start, each.end)}
    assert kept == [fixed or at in inside for at, fixed in enumerate(read.fixed)]


@given(prompts(), st.integers(1, 80))
def test_a_number_of_tokens(given: tuple[Tokens, PromptSaliency, int, str], budget: int) -> None:
    read, scored, size, align = given
    spans = divide(read, size, align)
    fixed = sum(read.fixed)
    scored_end = len(read) - scored.unscored_tail
    always = slow_choice(spans, scored.values.tolist(), 0, scored_end) if spans else set()
    required = fixed + sum(end - start for i, (start, end) in enumerate(spans) if i in always)
    if spans and required > budget:
        with pytest.raises(ValueError, match=f"tokens must be at least {required}, .*got {budget}"):
            choose(read, spans, scored, rate=None, budget=budget)
        return
    chunks = choose(read, spans, scored, rate=None, budget=budget)
    total = sum(kept_tokens(read, chunks))
    if not spans:
        return
    assert total <= budget
    count = sum(each.kept for each in chunks)
    values = scored.values.tolist()
    assert {i for i, each in enumerate(chunks) if each.kept} == slow_choice(
        spans, values, count, scored_end
    )
    if count < len(spans):  # the next best would not have fitted
        more = slow_choice(spans, values, count + 1, scored_end)
        assert fixed + sum(spans[i][1] - spans[i][0] for i in more) > budget
    larger = choose(read, spans, scored, rate=None, budget=budget + size)
    assert all(b.kept for a, b in zip(chunks, larger, strict=True) if a.kept)


def test_a_choice_by_hand() -> None:
    values = [0.0, 0.0, 3.0, 1.0, 5.0, 5.0, 2.0, 2.0, 0.0, 0.0]
    read = tokens([1] * 10)
    chunks = choose(read, divide(read, 2, "token"), saliency(values), rate=0.6, budget=None)
    assert chunks == [
        Chunk(0, 2, 0.0, True, True),
        Chunk(2, 4, 2.0, False, False),
        Chunk(4, 6, 5.0, False, True),
        Chunk(6, 8, 2.0, False, False),
        Chunk(8, 10, 0.0, True, True),
    ]
    # The earlier of two equals.
    four = choose(read, divide(read, 2, "token"), saliency(values), rate=0.8, budget=None)
    assert [each.kept for each in four] == [True, True, True, False, True]


def test_a_tail_without_saliency_is_kept() -> None:
    read = tokens([1] * 10)
    chunks = choose(read, divide(read, 2, "token"), saliency([0.0] * 10, 3), rate=0.1, budget=None)
    assert [each.kept for each in chunks] == [True, False, False, True, True]


def test_rates_are_exact() -> None:
    """0.07 * 100 is a little more than 7 in floating point, and 7 chunks are 7% of 100."""
    read = tokens([1] * 100)
    for rate, count in ((0.07, 7), (0.14, 14), (0.55, 55), (0.1, 10), (0.101, 11)):
        chunks = choose(
            read, divide(read, 1, "token"), saliency([1.0] * 100), rate=rate, budget=None
        )
        assert sum(each.kept for each in chunks) == count


def test_runs() -> None:
    assert runs([]) == []
    assert runs([False]) == [(0, 1, False)]
