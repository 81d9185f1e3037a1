"""Read and write a results folder: its settings, and a line for every finished sample.

``settings.json`` says what was asked for, of which model and on what; ``samples.jsonl`` has a line
a sample, written whole and at once, so that a kill loses what was being asked and no more. A folder
goes on only under the settings it was begun with.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
from filelock import FileLock, Timeout

from kvpolicy.evaluation.results import check_folder, write_all
from kvpolicy.evaluation.suite.sample import Cell, Method, Sample

SETTINGS, SAMPLES, LOCK = "settings.json", "samples.jsonl", ".lock"
FORMAT = 1


@attrs.frozen
class Description:
    """What a folder of results records about its evaluation: settings, machine and methods.

    Args:
        settings: What was asked for, and the model, as plain data.
        environment: Versions of libraries, and the machine.
        methods: By label, full context first.
        expected: How many samples every cell has when it is finished, in the order of asking.
    """

    settings: dict[str, Any]
    environment: dict[str, Any]
    methods: dict[str, Method]
    expected: dict[Cell, int]

    def to_json(self) -> str:
        """Return the description as the text of the file ``settings.json``."""
        cells = [{**attrs.asdict(cell), "samples": count} for cell, count in self.expected.items()]
        methods = {label: attrs.asdict(method) for label, method in self.methods.items()}
        data = {"format": FORMAT, "settings": self.settings, **self.environment}
        return json.dumps(data | {"methods": methods, "cells": cells}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Description:
        """Parse a description from the text of ``settings.json``.

        Raises:
            ValueError: It did not write it, or another version did, in another format.
        """
        try:
            read = json.loads(text)
            if read.pop("format") != FORMAT:
                raise ValueError(f"format must be {FORMAT}, which this version reads")
            expected = {}
            for each in read.pop("cells"):
                count = each.pop("samples")
                expected[Cell(**each)] = count
            methods = {label: Method(**each) for label, each in read.pop("methods").items()}
            return cls(read.pop("settings"), read, methods, expected)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"no settings of an evaluation: {error}") from None

    def differences(self, other: Description) -> list[str]:
        """List how another evaluation's settings differ; empty if both may share a folder.

        The number of processors of a machine counts for nothing, nor do the cells, which follow
        from the settings and the tasks' documents.
        """
        own, its = _flat(self), _flat(other)
        return [
            f"{name} was {_text(own.get(name))}, got {_text(its.get(name))}"
            for name in {**own, **its}
            if own.get(name) != its.get(name)
        ]


@attrs.frozen
class Results:
    """The description and all samples read from a folder of results.

    Args:
        description: What it is of.
        samples: All finished samples, in the order in which they were finished.
    """

    description: Description
    samples: tuple[Sample, ...]

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
    return Results(description, tuple(_read_samples(folder / SAMPLES, description)))


class Folder:
    """An open folder of results, to which only one process at a time adds samples.

    Args:
        path: The folder.
        results: What it held when it was opened.
    """

    def __init__(self, path: Path, results: Results) -> None:
        self.path = path
        self.results = results

    def append(self, samples: Sequence[Sample]) -> None:
        """Append finished samples to the results file, one line each, and flush to disk."""
        with (self.path / SAMPLES).open("ab") as file:
            file.write("".join(sample.to_line() for sample in samples).encode())
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def opened(path: Path, description: Description) -> Iterator[Folder]:
    """Lock a folder of results, new or of the same settings, so that only this process fills it.

    A last line that was not written to its end is cut off; nothing else of a folder is touched.

    Raises:
        ValueError: The folder is of something else, or another process writes to it.
    """
    check_folder(path, (SETTINGS, SAMPLES))
    path.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(path / LOCK, blocking=False):
            yield Folder(path, _begun(path, description))
    except Timeout:
        raise ValueError(
            f"out must be a folder that nobody writes to, got {path}, which another kvpolicy eval "
            "is filling"
        ) from None


def check_same(path: Path, description: Description) -> None:
    """Check that a folder of results is new or was made by an evaluation of the same settings.

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


def _begun(path: Path, description: Description) -> Results:
    check_same(path, description)
    if not (path / SETTINGS).exists():
        write_all(path, {SETTINGS: description.to_json().encode()})
    _cut_torn_line(path / SAMPLES)
    results = load(path)
    if results.description.expected != description.expected:
        raise ValueError(
            f"out must be a folder of the same documents, got {path}, whose tasks had others; give "
            "another --out"
        )
    return results


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
    read: set[tuple[Cell, int]] = set()
    for number, line in enumerate(file.read_bytes().splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            return
        try:
            sample = Sample.from_line(line.decode())
            if sample.cell not in description.expected:
                raise ValueError(f"{SETTINGS} has no cell {sample.cell}")
            if (sample.cell, sample.document) in read:
                raise ValueError(f"document {sample.document} is there twice ({sample.cell})")
        except ValueError as error:
            raise ValueError(f"{file}, line {number}: {error}") from None
        read.add((sample.cell, sample.document))
        yield sample


def _flat(description: Description) -> dict[str, Any]:
    """Return the settings, methods and versions that all runs in a folder must have in common."""
    read = json.loads(description.to_json())
    machine: Mapping[str, Any] = read.get("machine", {})
    return {
        **read["settings"],
        **{f"method {label}": each["parameters"] for label, each in read["methods"].items()},
        **{f"version of {name}": value for name, value in read.get("versions", {}).items()},
        **{name: value for name, value in machine.items() if name != "cpus"},
    }


def _text(value: Any) -> str:
    """Return a setting's value as text short enough for a message."""
    if isinstance(value, list):
        return ",".join(map(str, value)) or "none"
    return "not given" if value is None else str(value)
