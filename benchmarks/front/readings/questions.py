"""The questions of the study's three tasks, with the tokens that truly follow each document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

from benchmarks.front.measure import KINDS as OTHER_KINDS
from benchmarks.front.measure import Asked, needle_questions, word_questions
from kvpolicy.evaluation.tasks import long_answers, needle, ruler_words

MODULES = {"needle": needle, "words": ruler_words, "long": long_answers}
KINDS = {**OTHER_KINDS, "long": long_answers.KINDS}
LENGTHS = {"needle": 1024, "words": 1024, "long": 256}
# A loop of the long answers is gone round twice.
LOOP_STEPS = 24
_QUESTION_LEN = 3


@attrs.frozen(eq=False)
class Questions:
    """Documents of one kind, with questions that come later.

    Args:
        asked: Documents, questions, and how answers are scored.
        following: The question and right answer of each document, as token ids.
    """

    asked: Asked
    following: Sequence[Sequence[int]]

    def rows(self, start: int, stop: int) -> Questions:
        """Return some of the documents."""
        rows = slice(start, stop)
        asked = attrs.evolve(
            self.asked,
            documents=self.asked.documents[rows],
            questions=self.asked.questions[rows],
            score=lambda row, tokens: self.asked.score(start + row, tokens),
        )
        return Questions(asked, self.following[rows])


def questions(
    task: str, tokenizer: Any, kind: str, length: int, count: int, seed: int
) -> Questions:
    """Draw questions of a task: ``needle``, ``words`` or ``long`` (answers of many steps)."""
    if task == "long":
        return _long_questions(kind, length, count, seed)
    if task == "needle":
        asked = needle_questions(kind, length, count, seed)
        drawn = needle.NeedleTask(context_len=length, hops=1 + (kind == "two-hop"))
        answers: list[Any] = [each.answer for each in drawn.prompts(count, seed)]
    else:
        asked = word_questions(tokenizer, kind, length, count, seed)
        texts = [each.answer for each in ruler_words.prompts(kind, length, count, seed)]
        answers = tokenizer(texts).input_ids
    return Questions(asked, _joined(asked, answers))


def _long_questions(kind: str, length: int, count: int, seed: int) -> Questions:
    """Return walks of which the start is said after the document; steps until a wrong one count."""
    task = long_answers.LongAnswerTask(kind, length)
    if kind == "loop":
        task = attrs.evolve(task, steps=min(task.steps, LOOP_STEPS))
    prompts = task.prompts(count, seed)
    ids = torch.tensor([each.input_ids for each in prompts])

    def score(row: int, tokens: list[int]) -> float:
        return long_answers.right_steps(tokens, prompts[row].answer)

    parts = ids[:, :-_QUESTION_LEN], ids[:, -_QUESTION_LEN:]
    asked = Asked(*parts, len(prompts[0].answer), score)
    return Questions(asked, _joined(asked, [each.answer for each in prompts]))


def _joined(asked: Asked, answers: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return each question with its answer; the answer's last token has nothing to look up."""
    known = asked.questions.tolist()
    return [[*ids, *answer[:-1]] for ids, answer in zip(known, answers, strict=True)]
