"""Write a document's sentences: statements that answer questions, and filler.

A sentence is a tuple of words. What is looked up comes directly after what it is looked up by,
so that one step of an induction head finds it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import pairwise

from .vocabulary import ADJECTIVES, VERBS

Words = tuple[str, ...]

_CALLS = (("call",), ("we", "call"), ("they", "call"), ("some", "call"), ("many", "people", "call"))
_PLACES = ("in", "on", "by", "under", "over", "behind", "from", "with")
_TIMES = ("morning", "evening", "night", "winter", "summer", "spring", "autumn", "day")
_VERBS, _ADJECTIVES = VERBS.split(), ADJECTIVES.split()
LIST_WORDS = 8


def name_sentence(rng: random.Random, key: Words, name: Words) -> Words:
    """Write a key's name as a sentence, such as ``they call river amber fox .``."""
    return (*rng.choice(_CALLS), *key, *name, ".")


def road_sentences(nodes: Sequence[str]) -> list[Words]:
    """Write links between successive nodes as sentences such as ``road mill river .``.

    Example:
        >>> road_sentences(["mill", "river", "castle"])
        [('road', 'mill', 'river', '.'), ('road', 'river', 'castle', '.')]
    """
    return [("road", start, end, ".") for start, end in pairwise(nodes)]


def list_sentences(words: Sequence[str]) -> list[Words]:
    """Write words as lists of eight, each after the word ``list``."""
    starts = range(0, len(words), LIST_WORDS)
    return [("list", *words[start : start + LIST_WORDS], ".") for start in starts]


def saw_sentences(words: Sequence[str]) -> list[Words]:
    """Write words in sentences of three, such as ``we saw apple , river and apple .``."""
    triples = zip(words[::3], words[1::3], words[2::3], strict=False)
    return [("we", "saw", one, ",", two, "and", three, ".") for one, two, three in triples]


def filler_sentence(rng: random.Random, nouns: Sequence[str]) -> Words:
    """Write a sentence about one or two nouns that answers no question.

    Args:
        rng: source of the draw.
        nouns: those to speak of, at least one.
    """
    clause = ("the", rng.choice(_ADJECTIVES), rng.choice(nouns), rng.choice(_VERBS))
    place = (rng.choice(_PLACES), "the", rng.choice(nouns))
    form = rng.randrange(4)
    if form == 0:
        return (*clause, *place, ".")
    if form == 1:
        return ("in", "the", rng.choice(_TIMES), *clause, ".")
    if form == 2:
        return (*clause, "while", "the", rng.choice(nouns), rng.choice(_VERBS), ".")
    return (*clause, "and", "never", rng.choice(_VERBS), *place, ".")


def filler(rng: random.Random, nouns: Sequence[str], size: int) -> list[Words]:
    """Make filler sentences of ``size`` tokens; the first may be cut off at its start."""
    sentences: list[Words] = []
    room = size
    while room > 0:
        sentence = filler_sentence(rng, nouns)[-room:]
        sentences.append(sentence)
        room -= len(sentence)
    return sentences[::-1]


def in_order(rng: random.Random, groups: Iterable[Sequence[Words]]) -> list[Words]:
    """Shuffle groups of sentences into one list; each group keeps its own order."""
    queues = [list(group) for group in groups if group]
    turns = [number for number, queue in enumerate(queues) for _ in queue]
    rng.shuffle(turns)
    heads = [iter(queue) for queue in queues]
    return [next(heads[number]) for number in turns]
