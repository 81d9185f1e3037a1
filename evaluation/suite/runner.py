"""The interface of a runner, which holds the tasks and the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from kvpolicy.evaluation.suite.sample import Answer, Cell, Document

# Documents by task and length; the length is None for a task whose prompts have fixed lengths.
Documents = Mapping[tuple[str, int | None], Sequence[Document]]


class Runner(ABC):
    """Base of runners, which prepare a task's documents and have a model answer them."""

    @abstractmethod
    def documents(self) -> Documents:
        """Return all documents to be asked, by task and length, always in the same order.

        Raises:
            ValueError: One of them cannot be asked, such as a prompt that is too long.
        """

    @abstractmethod
    def answer(self, cell: Cell, documents: Sequence[Document]) -> list[Answer]:
        """Answer the documents of one cell, in their order."""


class Listener:
    """Base of listeners told of finished cells, to display them; does nothing."""

    def finished(self, cell: Cell, answers: Sequence[Answer], found: int) -> None:
        """Called when all samples of a cell are finished.

        Args:
            cell: The cell.
            answers: Of all its samples.
            found: How many of them had been there before.
        """
