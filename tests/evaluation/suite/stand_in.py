"""A runner without a model: its answers follow from the cell and the document alone."""

from collections.abc import Sequence
from pathlib import Path

from kvpolicy.evaluation.suite.description import Description
from kvpolicy.evaluation.suite.filling import expected_samples, fill
from kvpolicy.evaluation.suite.folder import Results, load, opened
from kvpolicy.evaluation.suite.runner import Documents, Runner
from kvpolicy.evaluation.suite.sample import FULL_CONTEXT, Answer, Cell, Document, Method
from kvpolicy.evaluation.variant import variants

QUESTIONS = ("with", "later")
BYTES = 512


class StandIn(Runner):
    """Full context is always right; SnapKV is wrong on every third document, FastKV on every other.

    Args:
        lengths: Of the task ``needle``, which hides something; ``reading`` has none.
        count: Documents of each task at each length.
        stop_after: Answers after which the machine is switched off.
        word: In every prompt.
    """

    def __init__(
        self,
        lengths: Sequence[int] = (256, 512),
        count: int = 6,
        *,
        stop_after: int | None = None,
        word: str = "filler",
    ) -> None:
        self.lengths, self.count, self.stop_after, self.word = lengths, count, stop_after, word
        self.asked: list[tuple[Cell, int]] = []

    def documents(self) -> Documents:
        needles = {("needle", length): self._documents(length) for length in self.lengths}
        return {**needles, ("reading", None): self._documents(None)}

    def _documents(self, length: int | None) -> list[Document]:
        return [
            Document(
                index,
                f"{self.word} {length} {index}",
                ("yes", "ja"),
                None if length is None else index / self.count,
            )
            for index in range(self.count)
        ]

    def answer(self, cell: Cell, documents: Sequence[Document]) -> list[Answer]:
        found = []
        for document in documents:
            if self.stop_after is not None and len(self.asked) >= self.stop_after:
                raise KeyboardInterrupt
            self.asked.append((cell, document.id))
            found.append(made_up(cell, document))
        return found


def made_up(cell: Cell, document: Document) -> Answer:
    """What the stand-in answers."""
    seen = cell.length or 100
    kept = seen if cell.method == FULL_CONTEXT else seen * float(cell.method.split()[1])
    every = 3 if cell.method.startswith("snapkv") else 2
    right = cell.method == FULL_CONTEXT or document.id % every != every - 1
    return Answer(
        prediction="yes\n" if right else "n\u00f6",
        scores={"match": float(right), "other": 0.25},
        tokens_seen=seen,
        tokens_kept=kept,
        bytes_held=round(kept * BYTES),
        prefill_seconds=seen / (1500 if "fastkv" in cell.method else 1000) + document.id / 10000,
        total_seconds=seen / 500,
    )


def described(
    runner: Runner, rates: Sequence[float] = (0.1, 0.5), **settings: object
) -> Description:
    """A description of the stand-in's documents under SnapKV and FastKV."""
    chosen = variants(["full_context", "snapkv", "fastkv"], rates)
    methods = {variant.label: Method.of(variant) for variant in chosen}
    expected = expected_samples(runner.documents(), QUESTIONS, list(methods))
    environment = {"versions": {"kvpolicy": "1"}, "machine": {"processor": "made up", "cpus": 2}}
    return Description({"model": "stand-in", **settings}, environment, methods, expected)


def filled(folder: Path, runner: StandIn | None = None, **settings: object) -> Results:
    """A folder of the stand-in's answers."""
    runner = runner or StandIn()
    with opened(folder, described(runner, **settings)) as target:
        fill(target, runner, runner.documents(), batch_size=2)
    return load(folder)
