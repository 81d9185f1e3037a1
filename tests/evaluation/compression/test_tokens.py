"""Where tokens stand in a text, where it can be cut, and what is never cut."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.evaluation.compression.chat import Message, Rendered, render
from kvpolicy.evaluation.compression.tokens import (
    BETWEEN_LINES,
    BETWEEN_TOKENS,
    BETWEEN_WORDS,
    INSIDE_CHARACTER,
    Tokens,
    tokens_of,
)
from kvpolicy.evaluation.tasks.ruler_words import load_tokenizer
from tests.evaluation.compression.tokenizers import SlowTokenizer, byte_tokenizer

BYTES, WORDS = byte_tokenizer(), load_tokenizer()
TEXTS = st.text(st.sampled_from("the river\n  .0é王😀\u0301"), min_size=1, max_size=60)


def plain(tokenizer: Any, text: str, *kept: tuple[int, int], cut_special: bool = False) -> Tokens:
    rendered = Rendered(text, ((0, len(text)),))
    return tokens_of(tokenizer, rendered, kept, cut_special=cut_special)


@pytest.mark.parametrize("tokenizer", [BYTES, WORDS])
@given(text=TEXTS)
def test_all_tokens_together_are_the_text(tokenizer: Any, text: str) -> None:
    tokens = plain(tokenizer, text)
    if not tokens.ids:
        return
    assert tokens.starts is not None
    assert len(tokens.starts) == len(tokens) + 1 == len(tokens.borders) + 1
    assert list(tokens.starts) == sorted(tokens.starts)
    assert (tokens.starts[0], tokens.starts[-1]) == (0, len(text))
    pieces = [text[start:end] for start, end in pairwise(tokens.starts)]
    assert "".join(pieces) == text


@given(text=TEXTS)
def test_text_can_be_cut_at_borders(text: str) -> None:
    """What stands before a border and behind it, made tokens apart, is the text again."""
    tokens = plain(BYTES, text)
    assert tokens.starts is not None
    for at in range(1, len(tokens)):
        here, border = tokens.starts[at], tokens.borders[at]
        before, behind = BYTES.decode(tokens.ids[1:at]), BYTES.decode(tokens.ids[at:])
        if border == INSIDE_CHARACTER:
            assert before + behind != text
            continue
        assert (before, behind) == (text[:here], text[here:])
        if 0 < here < len(text):
            spaced = text[here - 1].isspace() or text[here].isspace()
            assert (border >= BETWEEN_WORDS) == spaced
            line = text[here - 1] == "\n" and text[here] != "\n"
            assert (border == BETWEEN_LINES) == line


def test_borders_by_hand() -> None:
    tokens = plain(byte_tokenizer(vocab_size=259), "a b\n\nc😀")
    # <|begin|>, a, space, b, two line ends, c, and four bytes of one character.
    assert tokens.borders == (
        BETWEEN_LINES, BETWEEN_LINES, BETWEEN_WORDS, BETWEEN_WORDS, BETWEEN_WORDS, BETWEEN_WORDS,
        BETWEEN_LINES, BETWEEN_TOKENS, INSIDE_CHARACTER, INSIDE_CHARACTER, INSIDE_CHARACTER,
    )  # fmt: skip
    assert tokens.starts == (0, 0, 1, 2, 3, 4, 5, 6, 6, 6, 6, 7)


def test_what_is_fixed() -> None:
    text = "the river<|end|> horse 王"
    tokens = plain(BYTES, text, (text.index("rse"), text.index("rse") + 1))
    assert tokens.starts is not None
    fixed = [
        (BYTES.convert_ids_to_tokens(token), text[start:end])
        for token, flag, (start, end) in zip(
            tokens.ids, tokens.fixed, pairwise(tokens.starts), strict=True
        )
        if flag
    ]
    assert [each for each, _ in fixed[:2]] == ["<|begin|>", "<|end|>"]
    assert len(fixed) == 3
    assert "r" in fixed[2][1]
    loose = plain(BYTES, text, cut_special=True)
    assert [token for token, flag in zip(loose.ids, loose.fixed, strict=True) if flag] == [0]


def test_unknown_words_can_be_cut() -> None:
    tokens = plain(WORDS, "<bos> notaword river")
    assert tokens.ids[1] == WORDS.unk_token_id
    assert tokens.fixed == (True, False, False)


def test_a_templates_words_are_fixed() -> None:
    messages = [Message({"role": role, "content": "user system"}) for role in ("system", "user")]
    tokens = tokens_of(BYTES, render(BYTES, messages), ())
    assert tokens.starts is not None
    cut = "".join(
        tokens.text[start:end]
        for flag, (start, end) in zip(tokens.fixed, pairwise(tokens.starts), strict=True)
        if not flag
    )
    assert cut == "user systemuser system"
    assert tokens.ids[0] == BYTES.convert_tokens_to_ids("<|start|>")  # and no second <|begin|>


def test_without_offsets() -> None:
    slow = SlowTokenizer()
    tokens = plain(slow, "one two three")
    assert tokens.starts is None
    assert tokens.fixed == (True, False, False, False)
    assert set(tokens.borders) == {BETWEEN_TOKENS}
    with pytest.raises(ValueError, match="tokenizer must tell which characters .* SlowTokenizer"):
        plain(slow, "one two", (0, 3))
