"""Documents of list questions, of any length in tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence

from .counts import common_list, frequent_list
from .questions import Question, ask_words
from .sentences import LIST_WORDS, Words, filler, in_order, list_sentences, saw_sentences

MIN_FILLER_NOUNS = 24


def common_document(
    rng: random.Random, nouns: Sequence[str], size: int, num_common: int = 4, ratio: int = 5
) -> tuple[list[Words], Question]:
    """Return a list of ``size`` tokens and the question for its common words."""
    num_words = size // (LIST_WORDS + 2) * LIST_WORDS
    words, common = common_list(rng, nouns, num_words, num_common, ratio)
    sentences = list_sentences(words)
    rest = [noun for noun in nouns if noun not in common]
    return [*filler(rng, rest, size - _tokens(sentences)), *sentences], ask_words("common", common)


def frequent_document(
    rng: random.Random, nouns: Sequence[str], size: int, num_rare: int = 13
) -> tuple[list[Words], Question]:
    """Return text of ``size`` tokens, half of it filler, and the question for frequent words."""
    num_words = max(size // 2 // 8, 5) * 3
    words, frequent = frequent_list(rng, nouns, num_words, num_rare)
    sentences = saw_sentences(words)
    rest = [noun for noun in nouns if noun not in words][:MIN_FILLER_NOUNS]
    said = filler(rng, rest, size - _tokens(sentences))
    return [said[0], *in_order(rng, [said[1:], sentences])], ask_words("frequent", frequent)


def _tokens(sentences: Sequence[Words]) -> int:
    return sum(map(len, sentences))
