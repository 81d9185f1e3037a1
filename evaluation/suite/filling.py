"""Answer the missing samples of a results folder, cell by cell and batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvpolicy.evaluation.progress import Progress, silent
from kvpolicy.evaluation.suite.folder import Folder
from kvpolicy.evaluation.suite.runner import Documents, Listener, Runner
from kvpolicy.evaluation.suite.sample import Answer, Cell, Document, Sample


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
    """Answer all samples that a run asks for and its folder lacks; none is asked again.

    A sample's number is its document's place among those of its task and length, so that it stays
    the same where more lengths or samples are asked for.

    Args:
        folder: Where samples go, each batch as soon as it is answered.
        runner: Answers them.
        documents: By task and length, as the run's description expects them.
        batch_size: Documents that are answered at once.
        progress: Told of every batch.
        listener: Told of every finished cell.

    Raises:
        ValueError: The folder's samples are of other prompts than the documents, or a batch cannot
            be answered.
    """
    _check_prompts(folder.samples, documents)
    folder.begin()
    there: dict[Cell, dict[int, Answer]] = {cell: {} for cell in folder.asked}
    for sample in folder.samples:
        if sample.document < folder.asked.get(sample.cell, 0):
            there[sample.cell][sample.document] = sample.answer
    total = sum(folder.asked.values())
    done = sum(map(len, there.values()))
    for cell, answers in there.items():
        found = len(answers)
        asked = documents[cell.task, cell.length]
        missing = [each for each in enumerate(asked) if each[0] not in answers]
        for batch in _batches(missing, batch_size):
            progress(str(cell), done, total)
            method = folder.description.methods[cell.method]
            came = runner.answer(cell, [document for _, document in batch])
            folder.append(
                [
                    Sample.of(cell, method, number, document, answer)
                    for (number, document), answer in zip(batch, came, strict=True)
                ]
            )
            answers |= zip((number for number, _ in batch), came, strict=True)
            done += len(batch)
        if listener is not None:
            listener.finished(cell, [answers[number] for number in sorted(answers)], found)
    progress("done", done, total)


def _batches(
    documents: Sequence[tuple[int, Document]], size: int
) -> Iterator[Sequence[tuple[int, Document]]]:
    for start in range(0, len(documents), size):
        yield documents[start : start + size]


def _check_prompts(samples: Sequence[Sample], documents: Documents) -> None:
    """Check that the folder's finished samples were asked with the same prompts."""
    for sample in samples:
        place = sample.cell.task, sample.cell.length
        asked = documents.get(place, ())[sample.document : sample.document + 1]
        if any(each.digest != sample.prompt_digest for each in asked):
            raise ValueError(
                f"out must be a folder of the same prompts, got one where document "
                f"{sample.document} of {sample.cell.task} was another; have the data, the "
                "tokenizer or the task changed? Give another --out"
            )
