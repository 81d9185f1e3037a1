"""Define a question about a document, and say how an answer to it is scored."""

import re
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher

import attrs

# Gets a generated text and the right answers; returns a score in [0, 1].
Score = Callable[[str, Sequence[str]], float]


def any_answer(text: str, answers: Sequence[str]) -> float:
    """Return 1 if one of the answers is in a text, else 0.

    Only whole words and numbers count, in upper or lower case.

    Example:
        >>> any_answer("It is 4322492.", ["4322492"]), any_answer("It is 43224921", ["4322492"])
        (1.0, 0.0)
    """
    return float(any(_has(text, answer) for answer in answers))


def share_of_answers(text: str, answers: Sequence[str]) -> float:
    """Return the fraction of the answers that are in a text, by the rule of `any_answer`.

    Example:
        >>> share_of_answers("12 and 34", ["12", "34", "56", "78"])
        0.5
    """
    return sum(_has(text, answer) for answer in answers) / len(answers)


def line_similarity(text: str, answers: Sequence[str]) -> float:
    r"""Return how similar the first line of a text is to the most similar answer: ``2 M / T``.

    ``M`` characters match of ``T`` in both together, by `difflib`. White space around a line does
    not count, nor do blank lines before it.

    Example:
        >>> line_similarity("\n    return 1\nnext", ["return 2"])
        0.875
    """
    line = text.strip().split("\n")[0].strip()
    return max(
        SequenceMatcher(None, line, each.strip(), autojunk=False).ratio() for each in answers
    )


def _has(text: str, answer: str) -> bool:
    pattern = rf"(?<!\w){re.escape(answer.strip())}(?!\w)"
    return re.search(pattern, text, re.IGNORECASE) is not None


@attrs.frozen
class Question:
    """A question about a document, with its right answers.

    Args:
        document: What comes before the question. A policy may have to read it without the question.
        question: The question; for a ``plain`` one the text that follows the document.
        answers: Right answers, at least one.
        kind: The kind of question, such as ``"number"``; each kind is reported by itself.
        score: Scores a generated text.
        prefix: How the model's reply begins. It is given to the model, so that also small and
            untuned models answer with nothing but the answer.
        expected: The text whose probability is measured; by default the first answer. After a
            prefix or a ``plain`` question it follows exactly so, with its own white space.
        expected_tokens: Number of its first tokens that are measured; None for all.
        new_tokens: Tokens to generate at most; 0 if only probabilities are measured.
        one_line: True if generating ends with the first line that is not blank.
        plain: True if the model continues document and question as one text: no chat template, no
            words around them.
    """

    document: str
    question: str
    answers: tuple[str, ...]
    kind: str
    score: Score = any_answer
    prefix: str = ""
    expected: str = attrs.field()
    expected_tokens: int | None = None
    new_tokens: int = 0
    one_line: bool = True
    plain: bool = False

    @expected.default
    def _first_answer(self) -> str:
        return f" {self.answers[0]}" if self.prefix else self.answers[0]

    def __attrs_post_init__(self) -> None:
        if not self.answers or not all(each.strip() for each in (*self.answers, self.expected)):
            raise ValueError(
                f"answers must be texts that are not blank, at least one, got {self.answers!r}"
            )
