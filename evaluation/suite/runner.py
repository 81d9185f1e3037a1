"""Define the interface of a runner, which has the tasks and the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from kvpolicy.evaluation.suite.sample import Answer, Cell, Document

# Documents by task and length; the length is None for a task whose prompts are as long as they are.
Documents = Mapping[tuple[str, int | None], Sequence[Document]]


class Runner(ABC):
    """A runner that prepares documents and answers them under a policy."""

    @abstractmethod
    def documents(self) -> Documents:
        """Return all documents to be asked, always in the same order.

        Raises:
            ValueError: One of them cannot be asked, such as a prompt that is too long.
        """

    @abstractmethod
    def answer(self, cell: Cell, documents: Sequence[Document]) -> list[Answer]:
        """Answer documents of a cell, in their order."""


class Listener:
    """A listener that is told of finished cells; this one does nothing."""

    def finished(self, cell: Cell, answers: Sequence[Answer], found: int) -> None:
        """Receive a finished cell.

        Args:
            cell: The cell.
            answers: Of all its samples.
            found: How many of them had been there before.
        """
