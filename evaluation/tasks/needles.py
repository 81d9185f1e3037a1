"""Ask for facts that are hidden in documentation: needles in a haystack, as in RULER.

Source: Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?",
arXiv:2404.06654. The words differ, the haystack is Python's documentation, and beside numbers of
seven digits there are words: an answer of one token and one of many lose different things.
"""

import re
from collections.abc import Sequence
from itertools import islice
from random import Random
from typing import ClassVar

import attrs

from kvpolicy.evaluation.tasks.question import Question, share_of_answers
from kvpolicy.evaluation.tasks.task import SizedTask, depth_of
from kvpolicy.evaluation.texts import documentation

KINDS = ("word", "number", "keys", "values")
# Facts of the kinds "keys" and "values" in a document.
_MANY, _VALUES = 4, 2
# Each is one token after a space, in most vocabularies.
_PLACES = (
    "Paris London Berlin Madrid Rome Vienna Tokyo Delhi Cairo Lima Boston Chicago Moscow Dublin "
    "Oslo Athens Sydney Toronto Seattle Denver Atlanta Dallas Houston Miami Lisbon Prague Warsaw "
    "Zurich Geneva Milan Naples Florence Venice Hamburg Munich Mumbai Seoul Shanghai Manila Havana"
)
_WORDS = (
    "apple bridge candle dragon engine forest garden hammer island jacket kitchen ladder mirror "
    "needle orange pencil rabbit saddle temple umbrella valley window anchor basket camera desert "
    "eagle falcon guitar harbor jungle lemon marble ocean pepper river silver tiger tunnel velvet "
    "violin wagon winter copper cotton dolphin diamond feather flower lantern lion meadow monkey "
    "mountain onion palace parrot piano planet potato pumpkin rocket salmon shadow spider"
)
PLACES, WORDS = _PLACES.split(), _WORDS.split()
# Of each kind: a fact, the question, and how the reply begins. Each was chosen because two models
# of 135 and 270 million parameters, one of them untuned, answer it with full context.
_NUMBER = (
    "The special magic number of {place} is {value}.",
    "What is the special magic number of {place}?",
    "The special magic number of {place} is",
)
_WORDING = {
    "word": (
        "In {place} they love the {value}.",
        "What do they love in {place}?",
        "In {place} they love the",
    ),
    "number": _NUMBER,
    "keys": _NUMBER,
    "values": (
        "One of the special magic numbers of {place} is {value}.",
        "What are the two special magic numbers of {place}?",
        "The two special magic numbers of {place} are the numbers",
    ),
}


@attrs.frozen
class Needles(SizedTask):
    """Questions for facts at evenly spread depths of a document, of up to four kinds in turn.

    - ``word``: one fact, whose answer is a word, one token in most vocabularies.
    - ``number``: one fact, whose answer is a number of seven digits.
    - ``keys``: four numbers of different places, one of which is asked for.
    - ``values``: two numbers of one place, both of which are asked for; scored by the share found.
    """

    name: ClassVar[str] = "needles"
    kinds: tuple[str, ...] = KINDS

    def __attrs_post_init__(self) -> None:
        if not self.kinds or not set(self.kinds) <= set(KINDS):
            raise ValueError(f"kinds must be among {', '.join(KINDS)}, got {self.kinds!r}")

    def draft(self, size: int, index: int, rng: Random) -> Question:
        """Make one question; the unit is a word of documentation."""
        kind = self.kinds[index % len(self.kinds)]
        depth = depth_of(index // len(self.kinds))
        count = {"keys": _MANY, "values": _VALUES}.get(kind, 1)
        places = rng.sample(PLACES, count)
        if kind == "values":
            places = places[:1] * count
        numbers = [str(number) for number in rng.sample(range(10**6, 10**7), count)]
        values = rng.sample(WORDS, count) if kind == "word" else numbers
        fact, asked, prefix = _WORDING[kind]
        facts = [
            fact.format(place=place, value=value)
            for place, value in zip(places, values, strict=True)
        ]
        depths = [(depth + number / count) % 1.0 for number in range(count)]
        document = hidden("".join(islice(documentation(rng), size)), facts, depths)
        answers: tuple[str, ...] = (values[0],)
        expected = f" {values[0]}"
        if kind == "values":
            answers = tuple(sorted(values, key=document.index))
            expected = f" {' and '.join(answers)}"
        return Question(
            document=document,
            question=asked.format(place=places[0]),
            answers=answers,
            kind=kind,
            score=share_of_answers,
            prefix=prefix.format(place=places[0]),
            expected=expected,
            new_tokens=len(expected) + 4,
        )


def hidden(text: str, facts: Sequence[str], depths: Sequence[float]) -> str:
    """Return a text with each fact behind the sentence or paragraph that ends nearest to it."""
    ends = [0, *(found.end() for found in re.finditer(r"\.\s+|\n\n", text))]
    placed = []
    for fact, depth in zip(facts, depths, strict=True):
        wanted = depth * len(text)
        placed.append((min(ends, key=lambda at: abs(at - wanted)), fact))
    for place, fact in sorted(placed, reverse=True):
        before, after = text[:place], text[place:]
        text = before + fact + (before[len(before.rstrip()) :] or " ") + after
    return text.rstrip()
