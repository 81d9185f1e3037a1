"""Define tasks: questions of one sort, made for any tokenizer and any length of prompt."""

from abc import ABC, abstractmethod
from bisect import bisect_right
from random import Random
from typing import Any, ClassVar

from kvpolicy.checks import check_count
from kvpolicy.evaluation.asking import Asked, Asker
from kvpolicy.evaluation.tasks.question import Question

# Fraction parts of its multiples fill [0, 1) evenly, however many are taken.
_GOLDEN = (5**0.5 - 1) / 2


class Task(ABC):
    """Questions of one sort, under a name."""

    name: ClassVar[str]

    @abstractmethod
    def questions(self, tokenizer: Any, tokens: int, count: int, seed: int = 0) -> list[Asked]:
        """Return questions as token ids, for one tokenizer.

        Args:
            tokenizer: A tokenizer of Transformers.
            tokens: The most tokens of a prompt: document, question, chat template.
            count: Number of questions, at least 1.
            seed: Of what is drawn at random. The same seed gives the same questions on every
                machine with the same version of Python, and a longer list begins with a shorter
                one.

        Raises:
            ValueError: ``tokens`` leaves no room for a question, or ``count`` is below 1.
        """


class SizedTask(Task):
    """A task that makes the largest documents that fit, from ``smallest`` of its units on."""

    smallest: ClassVar[int] = 1

    @abstractmethod
    def draft(self, size: int, index: int, rng: Random) -> Question:
        """Make one question; the random generator is for all draws.

        Args:
            size: Units of the document, such as words or lines, each at least one token; more give
                a longer document.
            index: The question's place in the list, from 0.
            rng: It begins anew for every size, so that what is drawn before anything depends on the
                size is the same in all of them.
        """

    def questions(self, tokenizer: Any, tokens: int, count: int, seed: int = 0) -> list[Asked]:
        """Return questions whose documents are as large as possible; see `Task.questions`."""
        check_count("count", count, minimum=1)
        asker = Asker(tokenizer)
        return [self._largest(asker, tokens, index, seed) for index in range(count)]

    def _largest(self, asker: Asker, tokens: int, index: int, seed: int) -> Asked:
        def made(size: int) -> Asked:
            return asker.ask(self.draft(size, index, Random(f"{self.name} {seed} {index}")))

        low = self.smallest
        least = made(low)
        if least.prompt_len > tokens:
            raise ValueError(
                f"tokens must be at least {least.prompt_len} for a prompt of {self.name} with this "
                f"tokenizer, got {tokens}"
            )
        while 2 * low <= tokens and made(2 * low).prompt_len <= tokens:
            low *= 2
        sizes = range(low + 1, min(2 * low, tokens) + 1)
        return made(low + bisect_right(sizes, tokens, key=lambda size: made(size).prompt_len))


def depth_of(index: int) -> float:
    """Return how deep in a document question ``index`` is placed, in [0, 1).

    Depths of one question after the other are spread evenly, however many there are.

    Example:
        >>> [round(depth_of(index), 2) for index in range(5)]
        [0.5, 0.12, 0.74, 0.35, 0.97]
    """
    return (0.5 + index * _GOLDEN) % 1.0
