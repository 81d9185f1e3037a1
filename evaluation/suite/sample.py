"""A sample: one document asked once, with its answer and costs, as a line of JSON."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import attrs

from kvpolicy.evaluation.variant import Variant

FULL_CONTEXT = "full_context"


@attrs.frozen(order=True)
class Cell:
    """A task at one prompt length, asked in one way under one method: a cell of the results.

    Args:
        task: The task's name.
        length: Tokens that its prompts were made for; None for a task whose prompts are as long as
            they are.
        question: ``"with"`` where the policy sees the question when it chooses, ``"later"`` where
            the question is asked after the context has been read.
        method: A policy and its retention, such as ``"snapkv 0.1"``; ``"full_context"`` for none.
    """

    task: str
    length: int | None
    question: str
    method: str

    def __str__(self) -> str:
        length = "" if self.length is None else f" {self.length:,}"
        return f"{self.task}{length}, question {self.question}, {self.method}"

    @property
    def baseline(self) -> Cell:
        """The cell in which the same documents are asked with full context."""
        return attrs.evolve(self, method=FULL_CONTEXT)


@attrs.frozen
class Document:
    """A task's document: the prompt that is given to the model, and its id.

    Args:
        id: Which of the task's documents it is, from 0, for its runner.
        prompt: All that the model reads.
        references: Answers that count as right.
        depth: Where in the prompt the needle lies, as a fraction of its length; None where there is
            none, or more than one.
    """

    id: int
    prompt: str
    references: tuple[str, ...]
    depth: float | None = None

    @property
    def digest(self) -> str:
        """A hash of the prompt, by which a changed prompt is noticed."""
        return hashlib.sha256(self.prompt.encode()).hexdigest()[:16]


@attrs.frozen
class Answer:
    """A model's answer to one document under a policy, with its scores and costs.

    Args:
        prediction: The text that was scored; for a multiple choice, the choice.
        scores: Scores by metric, the main metric first.
        tokens_seen: Tokens of the prompt.
        tokens_kept: Tokens kept of the prompt after prefill, the mean over layers and heads.
        bytes_held: Bytes of the cache after prefill.
        prefill_seconds: Seconds to read the prompt; in a batch, its share of the batch's seconds.
        total_seconds: Seconds to read the prompt and generate the answer, counted in the same way.
    """

    prediction: str
    scores: dict[str, float]
    tokens_seen: int
    tokens_kept: float
    bytes_held: int
    prefill_seconds: float
    total_seconds: float


@attrs.frozen
class Method:
    """A policy of an evaluation as saved in a folder: its name, parameters and retention.

    Args:
        policy: Its name.
        rate: The retention rate it was given, if any.
        tokens: The retention in tokens, in place of a rate.
        parameters: The policy as it is written in Python, with all of its parts.
    """

    policy: str
    rate: float | None
    tokens: int | None
    parameters: str

    @classmethod
    def of(cls, variant: Variant) -> Method:
        """Make the saved form of a policy variant."""
        return cls(
            variant.name, variant.retention_rate, variant.retention_tokens, repr(variant.policy)
        )


@attrs.frozen
class Sample:
    """The answer to one document in a cell, as saved in one line of the results file.

    Args:
        cell: What it counts to.
        policy: The policy's name.
        rate: Its retention rate, if it has one.
        document: The document's number among those of its task and length, from 0.
        prompt_digest: See `Document.digest`.
        references: See `Document`.
        depth: See `Document`.
        answer: What came.
    """

    cell: Cell
    policy: str
    rate: float | None
    document: int
    prompt_digest: str
    references: tuple[str, ...]
    depth: float | None
    answer: Answer

    @classmethod
    def of(
        cls, cell: Cell, method: Method, number: int, document: Document, answer: Answer
    ) -> Sample:
        """Make a sample from a cell's document, by its number, and its answer."""
        return cls(
            cell,
            method.policy,
            method.rate,
            number,
            document.digest,
            document.references,
            document.depth,
            answer,
        )

    def to_line(self) -> str:
        """Return the sample as a line of JSON for the results file."""
        data = attrs.asdict(self)
        flat = {**data.pop("cell"), **data}
        flat |= flat.pop("answer")
        return json.dumps(flat, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_line(cls, line: str) -> Sample:
        """Parse a sample from a line of the results file.

        Raises:
            ValueError: It did not write it.
        """
        try:
            read: dict[str, Any] = json.loads(line)
            cell = Cell(**{each.name: read.pop(each.name) for each in attrs.fields(Cell)})
            answer = Answer(**{each.name: read.pop(each.name) for each in attrs.fields(Answer)})
            read["references"] = tuple(read["references"])
            return cls(cell=cell, answer=answer, **read)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"not a sample of an evaluation: {error!r}") from None
