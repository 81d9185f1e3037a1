"""Measure how probable a document's own continuation is to a model that has read its beginning."""

from itertools import islice
from pathlib import Path
from random import Random
from typing import ClassVar

import attrs
from attrs.validators import ge, instance_of

from kvpolicy.evaluation.tasks.question import Question
from kvpolicy.evaluation.tasks.task import SizedTask
from kvpolicy.evaluation.texts import documentation, read_text, words_of


@attrs.frozen
class Continuation(SizedTask):
    """Beginnings of documents, whose next tokens are measured; nothing is generated or asked.

    ``length`` of them are measured, at least 1. Every part of a text ``file`` is as likely to be
    read; without one it is Python's documentation.
    """

    name: ClassVar[str] = "continuation"
    file: Path | None = None
    length: int = attrs.field(default=256, validator=[instance_of(int), ge(1)])

    def draft(self, size: int, index: int, rng: Random) -> Question:
        """Make one question; the unit is a word. ValueError if the file is too short."""
        needed = size + self.length  # a word is at least one token
        if self.file is None:
            words = list(islice(documentation(rng), needed))
        else:
            words = words_of(read_text(self.file, "text file"))
            if len(words) < needed:
                raise ValueError(
                    f"text file {self.file} must have at least {needed:,} words to read a "
                    f"beginning of it and measure {self.length} tokens, got {len(words):,}; give "
                    "a longer one, or fewer tokens"
                )
            start = int(rng.random() * (len(words) - needed + 1))
            words = words[start : start + needed]
        document = "".join(words[:size]).rstrip()
        return Question(
            document=document,
            question="",
            answers=("".join(words)[len(document) :],),
            kind="continuation",
            expected_tokens=self.length,
            plain=True,
        )
