"""Natural Questions with a passage each, among the passages of other questions.

Source: Liu et al., "Lost in the Middle", arXiv:2307.03172 (MIT), whose file
``nq-open-oracle.jsonl.gz`` is named by the variable ``NATURAL_QUESTIONS``.
"""

import gzip
import json
import os
from functools import cache
from random import Random
from typing import Any, ClassVar

import attrs

from kvpolicy.evaluation.tasks.question import Question
from kvpolicy.evaluation.tasks.task import SizedTask, depth_of

VARIABLE = "NATURAL_QUESTIONS"


@cache
def rows() -> list[dict[str, Any]]:
    """Return the rows of the file that the variable names."""
    path = os.environ.get(VARIABLE)
    if path is None:
        raise ValueError(f"{VARIABLE} must be the path of nq-open-oracle.jsonl.gz, got nothing")
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@attrs.frozen
class NaturalQuestions(SizedTask):
    """Questions whose answer is in one passage of many; the unit of a document is a passage."""

    name: ClassVar[str] = "natural_questions"

    def draft(self, size: int, index: int, rng: Random) -> Question:
        """Make one question."""
        drawn = rng.sample(range(len(rows())), size)
        asked = rows()[drawn[0]]
        place = int(depth_of(index) * size)
        order = [*drawn[1 : place + 1], drawn[0], *drawn[place + 1 :]]
        passages = [rows()[each]["ctxs"][0] for each in order]
        return Question(
            document="\n\n".join(f"{each['title']}: {each['text']}" for each in passages),
            question=f"{asked['question'].rstrip('?').capitalize()}?",
            answers=tuple(asked["answers"]),
            kind="natural questions",
            new_tokens=24,
        )
