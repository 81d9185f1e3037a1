"""Training rows: documents with many questions of every kind."""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs

from kvpolicy.evaluation.tasks.ruler_words.documents import common_document, frequent_document
from kvpolicy.evaluation.tasks.ruler_words.questions import (
    Question,
    ask_all_names,
    ask_names,
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

FILLER_NOUNS = 24
UNASKED_SHARE = 0.1
ANSWER_WORDS = 2


@attrs.frozen
class Asked:
    """A question in a row, and the kind that its accuracy counts for."""

    kind: str
    question: Question

    @property
    def size(self) -> int:
        """Tokens of the question and its answer."""
        return len(self.question.words) + len(self.question.answer)


@attrs.frozen
class Row:
    """A row: a document's sentences, then questions with their answers."""

    document: list[Words]
    asked: list[Asked]


def list_row(rng: random.Random, length: int) -> Row:
    """Return a row that asks for common or frequent words; ``length`` counts ``<bos>`` too."""
    if rng.random() < 0.5:
        num_common = rng.randint(2, 5)
        room = length - 1 - 2 * num_common
        ratio = rng.randint(4, 8)
        document, question = common_document(rng, NOUN_LIST, room, num_common, ratio)
        return Row(document, [Asked("common", question)])
    room = length - 1 - 6
    document, question = frequent_document(rng, NOUN_LIST, room, rng.randint(4, 20))
    return Row(document, [Asked("frequent", question)])


class NamesRow:
    """Draws the statements of one row until it is full, and the questions they answer."""

    def __init__(self, rng: random.Random, length: int, kinds: Sequence[str], most_filler: float):
        self.rng, self.kinds = rng, kinds
        nouns = rng.sample(NOUN_LIST, len(NOUN_LIST))
        self.filler_nouns, self.nouns = nouns[:FILLER_NOUNS], nouns[FILLER_NOUNS:]
        self.room = length - 1
        self.kept_free = int(length * rng.uniform(0, most_filler))
        self.groups: list[list[Words]] = []
        self.asked: list[Asked] = []

    def draw(self) -> Row:
        """Return the row, of exactly the length asked for."""
        while self._add(self.rng.choice(self.kinds)):
            pass
        self.rng.shuffle(self.asked)
        return Row(
            in_order(self.rng, [filler(self.rng, self.filler_nouns, self.room), *self.groups]),
            self.asked,
        )

    def _add(self, kind: str) -> bool:
        """Add a question of a kind and what answers it; False where there is no room."""
        if len(self.nouns) < 32:
            return False
        groups, question = getattr(self, "_" + kind.replace("-", "_"))()
        asked = Asked(kind, question)
        size = sum(len(sentence) for group in groups for sentence in group)
        if self.rng.random() < UNASKED_SHARE and self.asked:
            asked_now = []
        else:
            asked_now = [asked]
            size += asked.size
        if size + self.kept_free > self.room:
            return False
        self.room -= size
        self.groups += groups
        self.asked += asked_now
        return True

    def _take(self, count: int) -> Words:
        taken, self.nouns = self.nouns[:count], self.nouns[count:]
        return tuple(taken)

    def _single(self) -> tuple[list[list[Words]], Question]:
        return self._named(1)

    def _multi_query(self) -> tuple[list[list[Words]], Question]:
        return self._named(self.rng.randint(2, 5))

    def _named(self, count: int) -> tuple[list[list[Words]], Question]:
        pairs = [(self._take(1)[0], self._take(ANSWER_WORDS)) for _ in range(count)]
        return [[name_sentence(self.rng, *pair)] for pair in pairs], ask_names(pairs)

    def _multi_value(self) -> tuple[list[list[Words]], Question]:
        key = self._take(1)[0]
        names = [self._take(ANSWER_WORDS) for _ in range(self.rng.randint(2, 5))]
        return [[name_sentence(self.rng, key, name)] for name in names], ask_all_names(key, names)

    def _tracing(self) -> tuple[list[list[Words]], Question]:
        nodes = self._take(self.rng.randint(3, 5))
        return [road_sentences(nodes)], ask_road(nodes)
