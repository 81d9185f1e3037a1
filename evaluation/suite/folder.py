"""Read and write a results folder: its settings, and a line for every finished sample.

``settings.json`` says what was asked for, of which model and on what; ``samples.jsonl`` has a line
a sample, written whole and at once, so that a kill loses what was being asked and no more. A run
that asks for other policies, tasks, lengths or more samples extends a folder; one of another model
or on another machine is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs
from filelock import FileLock, Timeout

from kvpolicy.evaluation.results import check_folder, write_all
from kvpolicy.evaluation.suite.description import Description
from kvpolicy.evaluation.suite.sample import Cell, Sample

SETTINGS, SAMPLES, LOCK = "settings.json", "samples.jsonl", ".lock"


@attrs.frozen
class Source:
    """A folder from which results were read.

    Args:
        folder: The folder.
        description: What it is of.
        samples: How many finished samples it holds.
    """

    folder: Path
    description: Description
    samples: int


@attrs.frozen
class Results:
    """The description and all samples read from a folder of results, or from several.

    Args:
        description: What it is of.
        samples: All finished samples, in the order in which they were finished.
        sources: The folders.
    """

    description: Description
    samples: tuple[Sample, ...]
    sources: tuple[Source, ...] = ()

    def by_cell(self) -> dict[Cell, list[Sample]]:
        """Return the finished samples of each cell, keyed by document."""
        found: dict[Cell, list[Sample]] = {cell: [] for cell in self.description.expected}
        for sample in sorted(self.samples, key=lambda sample: sample.document):
            found[sample.cell].append(sample)
        return found


def load(folder: Path | str) -> Results:
    """Read a folder of results, finished or not, without changing it.

    Args:
        folder: As `kvpolicy eval` wrote it.

    Raises:
        ValueError: It is none, or its files are not what was written.
    """
    folder = Path(folder)
    file = folder / SETTINGS
    if not file.is_file():
        raise ValueError(
            f"results must be a folder that kvpolicy eval has written, got {folder}, which has no "
            f"{SETTINGS}"
        )
    try:
        description = Description.from_json(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    samples = tuple(_read_samples(folder / SAMPLES, description))
    return Results(description, samples, (Source(folder, description, len(samples)),))


class Folder:
    """An open folder of results, to which only one process at a time adds samples.

    Args:
        path: The folder.
        samples: Those it held when it was opened.
        description: What it is of when this run is finished.
        asked: How many samples this run asks for in each cell.
    """

    def __init__(
        self,
        path: Path,
        samples: Sequence[Sample],
        description: Description,
        asked: Mapping[Cell, int],
    ) -> None:
        self.path = path
        self.samples = samples
        self.description = description
        self.asked = asked

    def begin(self) -> None:
        """Record what is asked, before the first sample of this run is appended."""
        file, content = self.path / SETTINGS, self.description.to_json().encode()
        if not file.exists() or file.read_bytes() != content:
            write_all(self.path, {SETTINGS: content})

    def append(self, samples: Sequence[Sample]) -> None:
        """Append finished samples to the results file, one line each, and flush to disk."""
        with (self.path / SAMPLES).open("ab") as file:
            file.write("".join(sample.to_line() for sample in samples).encode())
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def opened(path: Path, description: Description) -> Iterator[Folder]:
    """Lock a folder of results, new or to be extended, so that only this process fills it.

    A last line that was not written to its end is cut off; no finished sample is touched.

    Raises:
        ValueError: The folder is of something else, or another process writes to it.
    """
    check_folder(path, (SETTINGS, SAMPLES))
    path.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(path / LOCK, blocking=False):
            yield _begun(path, description)
    except Timeout:
        raise ValueError(
            f"out must be a folder that no other process writes to, got {path}, which another "
            "kvpolicy eval is filling"
        ) from None


def check_same(path: Path, description: Description) -> None:
    """Check that a folder of results is new, or one that this evaluation may extend.

    Raises:
        ValueError: It is not; says what differs.
    """
    if (path / SETTINGS).exists():
        differences = load(path).description.differences(description)
        if differences:
            raise ValueError(
                f"out must be a new folder, or one of the same settings, got {path}, where "
                f"{'; '.join(differences)}; give another --out"
            )
    elif (path / SAMPLES).exists():
        raise ValueError(f"out {path} has {SAMPLES} but no {SETTINGS}; give another --out")


def _begun(path: Path, description: Description) -> Folder:
    check_same(path, description)
    if not (path / SETTINGS).exists():
        return Folder(path, (), description, description.expected)
    _cut_torn_line(path / SAMPLES)
    there = load(path)
    wanted = there.description.joined(description)
    return Folder(path, there.samples, wanted, description.expected)


def _cut_torn_line(file: Path) -> None:
    if not file.exists():
        return
    content = file.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(file, whole)


def _read_samples(file: Path, description: Description) -> Iterator[Sample]:
    """Yield the samples of a results file; an unfinished last line is ignored."""
    if not file.exists():
        return
    found: set[tuple[Cell, int]] = set()
    for number, line in enumerate(file.read_bytes().splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            return
        try:
            sample = Sample.from_line(line.decode())
            if sample.cell not in description.expected:
                raise ValueError(f"{SETTINGS} has no cell {sample.cell}")
            if (sample.cell, sample.document) in found:
                raise ValueError(f"document {sample.document} is there twice ({sample.cell})")
        except ValueError as error:
            raise ValueError(f"{file}, line {number}: {error}") from None
        found.add((sample.cell, sample.document))
        yield sample
