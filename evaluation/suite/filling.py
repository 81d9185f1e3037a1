"""Answer the missing samples of a results folder, cell by cell and batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvpolicy.evaluation.progress import Progress, silent
from kvpolicy.evaluation.suite.folder import Folder
from kvpolicy.evaluation.suite.runner import Documents, Listener, Runner
from kvpolicy.evaluation.suite.sample import Cell, Document, Sample


def expected_samples(
    documents: Documents, questions: Sequence[str], methods: Sequence[str]
) -> dict[Cell, int]:
    """Return every cell of an evaluation in order, with its number of samples.

    All methods answer a task's documents before the next task begins, so that what is there can be
    compared at any time.

    Args:
        documents: By task and length.
        questions: ``"with"``, ``"later"`` or both.
        methods: Labels, full context first.
    """
    return {
        Cell(task, length, question, method): len(found)
        for (task, length), found in documents.items()
        for question in questions
        for method in methods
    }


def fill(
    folder: Folder,
    runner: Runner,
    documents: Documents,
    *,
    batch_size: int = 1,
    progress: Progress = silent,
    listener: Listener | None = None,
) -> None:
    """Answer all samples that a folder of results lacks; finished samples are not asked again.

    Args:
        folder: Where samples go, each batch as soon as it is answered.
        runner: Answers them.
        documents: By task and length, as the folder's description expects them.
        batch_size: Documents that are answered at once.
        progress: Told of every batch.
        listener: Told of every finished cell.

    Raises:
        ValueError: The folder's samples are of other prompts than the documents, or a batch cannot
            be answered.
    """
    description = folder.results.description
    cells = folder.results.by_cell()
    _check_prompts(cells, documents)
    total = sum(description.expected.values())
    done = len(folder.results.samples)
    for cell, found in cells.items():
        answered = {sample.document for sample in found}
        asked = documents[cell.task, cell.length]
        answers = [sample.answer for sample in found]
        for batch in _batches([each for each in asked if each.id not in answered], batch_size):
            progress(str(cell), done, total)
            method = description.methods[cell.method]
            came = runner.answer(cell, batch)
            folder.append(
                [
                    Sample.of(cell, method, document, answer)
                    for document, answer in zip(batch, came, strict=True)
                ]
            )
            answers += came
            done += len(batch)
        if listener is not None:
            listener.finished(cell, answers, len(found))
    progress("done", done, total)


def _batches(documents: Sequence[Document], size: int) -> Iterator[Sequence[Document]]:
    for start in range(0, len(documents), size):
        yield documents[start : start + size]


def _check_prompts(cells: Mapping[Cell, Sequence[Sample]], documents: Documents) -> None:
    """Check that the folder's finished samples were asked with the same prompts."""
    for cell, found in cells.items():
        digests = {each.id: each.digest for each in documents[cell.task, cell.length]}
        for sample in found:
            if digests.get(sample.document) != sample.prompt_digest:
                raise ValueError(
                    f"out must be a folder of the same prompts, got one where document "
                    f"{sample.document} of {cell.task} was another; have the data, the tokenizer "
                    "or the task changed? Give another --out"
                )
