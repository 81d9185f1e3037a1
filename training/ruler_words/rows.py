"""Draw training rows: documents followed by many questions of every kind."""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs

from kvpolicy.evaluation.tasks.ruler_words.documents import (
    FILLER_NOUNS,
    NAME_WORDS,
    common_document,
    frequent_document,
)
from kvpolicy.evaluation.tasks.ruler_words.questions import (
    Question,
    ask_names,
    ask_past,
    ask_road,
)
from kvpolicy.evaluation.tasks.ruler_words.sentences import (
    Words,
    filler,
    in_order,
    name_sentence,
    road_sentences,
)
from kvpolicy.evaluation.tasks.ruler_words.vocabulary import NOUN_LIST

UNASKED_SHARE = 0.1
FEWEST_NOUNS = 40
MOST_QUERIES = 6
ONE_HOP_SHARE = 0.2

Drawn = tuple[list[list[Words]], list[Question]]
"""Groups of statements, each of which keeps its order, and the questions that they answer."""


@attrs.frozen
class Asked:
    """A question in a row, with the kind under which its accuracy counts."""

    kind: str
    question: Question

    @property
    def size(self) -> int:
        """Return the number of tokens of the question and its answer."""
        return len(self.question.words) + len(self.question.answer)


@attrs.frozen
class Row:
    """A training row: a document's sentences, then questions with their answers."""

    document: list[Words]
    asked: list[Asked]


def list_row(rng: random.Random, length: int) -> Row:
    """Return a row of ``length`` tokens that asks for a common or frequent word."""
    room = length - 1 - 3
    if rng.random() < 0.5:
        share, ratio = rng.uniform(1 / 12, 1 / 5), rng.randint(3, 6)
        return Row(*_asked("common", common_document(rng, NOUN_LIST, room, share, ratio)))
    return Row(*_asked("frequent", frequent_document(rng, NOUN_LIST, room, rng.randint(4, 20))))


def _asked(kind: str, drawn: tuple[list[Words], Question]) -> tuple[list[Words], list[Asked]]:
    document, question = drawn
    return document, [Asked(kind, question)]


class NamesRow:
    """Builds one row: draws statements and their questions until the row is full."""

    def __init__(self, rng: random.Random, length: int, kinds: Sequence[str], most_filler: float):
        self.rng, self.kinds = rng, kinds
        nouns = rng.sample(NOUN_LIST, len(NOUN_LIST))
        self.filler_nouns, self.nouns = nouns[:FILLER_NOUNS], nouns[FILLER_NOUNS:]
        self.room = length - 1
        self.kept_free = int(length * rng.uniform(0, most_filler))
        self.groups: list[list[Words]] = []
        self.asked: list[Asked] = []

    def draw(self) -> Row:
        """Return a row of exactly ``length`` tokens, ``<bos>`` included."""
        while self._add(self.rng.choice(self.kinds)):
            pass
        self.rng.shuffle(self.asked)
        return Row(
            in_order(self.rng, [filler(self.rng, self.filler_nouns, self.room), *self.groups]),
            self.asked,
        )

    def _add(self, kind: str) -> bool:
        """Add statements of one kind and their questions; return False if they do not fit."""
        if len(self.nouns) < FEWEST_NOUNS:
            return False
        groups, questions = getattr(self, "_" + kind.replace("-", "_"))()
        asked = [
            Asked(kind, question) for question in questions if self.rng.random() >= UNASKED_SHARE
        ]
        size = sum(len(sentence) for group in groups for sentence in group)
        size += sum(each.size for each in asked)
        if size + self.kept_free > self.room:
            return False
        self.room -= size
        self.groups += groups
        self.asked += asked
        return True

    def _take(self, count: int) -> Words:
        taken, self.nouns = self.nouns[:count], self.nouns[count:]
        return tuple(taken)

    def _single(self) -> Drawn:
        return self._named([self._take(1)])

    def _multi_query(self) -> Drawn:
        return self._named([self._take(1) for _ in range(self.rng.randint(2, MOST_QUERIES))])

    def _named(self, keys: Sequence[Words]) -> Drawn:
        pairs = [(key, self._take(NAME_WORDS)) for key in keys]
        return [[name_sentence(self.rng, *pair)] for pair in pairs], [ask_names(pairs)]

    def _two_hop(self) -> Drawn:
        start, key, name = self._take(1)[0], self._take(1), self._take(NAME_WORDS)
        groups = [road_sentences([start, *key]), [name_sentence(self.rng, key, name)]]
        # Only one question is asked: the answer to one would contain the answer to the other.
        one_hop = self.rng.random() < ONE_HOP_SHARE
        return groups, [ask_names([(key, name)]) if one_hop else ask_past(start, key[0], name)]

    def _tracing(self) -> Drawn:
        nodes = self._take(self.rng.randint(3, 6))
        return [road_sentences(nodes)], [ask_road(nodes)]
