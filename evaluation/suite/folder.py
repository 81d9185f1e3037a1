"""Keep what was answered in a folder: a file of settings, and a file for each cell.

A cell is a task at one length under one policy. Its file is replaced as a whole whenever more of it
is answered, so that a kill loses what was being asked and no more. A folder is of one model on one
machine; it is extended by other cells, and by more documents in each.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import attrs
from filelock import FileLock, Timeout

from kvpolicy.evaluation.models import Loaded
from kvpolicy.evaluation.results import as_json, check_folder, environment, write_all

SETTINGS, CELLS, LOCK = "settings.json", "cells", ".lock"
FULL_CONTEXT = "full_context"
FORMAT = 1


@attrs.frozen
class Sample:
    """The answer to one document: of each request, what the model said, its scores and costs.

    ``prompt`` is a hash, the task's main metric is the first of ``scores``, and costs are those of
    `RequestCosts`: the bytes of the largest request, the seconds of all.
    """

    document: int
    prompt: str
    answers: list[str]
    scores: dict[str, float]
    tokens_seen: int
    tokens_kept: float
    bytes_held: int
    prefill_seconds: float
    total_seconds: float


@attrs.frozen
class Cell:
    """A task at one length under one policy (``method``, and as Python writes it), and its answers.

    ``length`` is None for prompts of a length of the task's own.
    """

    task: str
    length: int | None
    later: bool
    method: str
    policy: str
    samples: tuple[Sample, ...] = ()

    def __str__(self) -> str:
        return f"{self.place}, {self.method}"

    @property
    def place(self) -> str:
        """The task, its length and when its question is asked, in words."""
        length = "" if self.length is None else f", {self.length:,} tokens"
        return f"{self.task}{length}{', asked later' if self.later else ''}"

    @property
    def file(self) -> str:
        """The name of its file."""
        asked = "later" if self.later else "with"
        name = f"{self.task}.{self.length or 'own'}.{asked}.{self.method}.json"
        return re.sub(r"[^\w.,@-]+", "_", name)

    @property
    def order(self) -> tuple[Any, ...]:
        """Its place in a table: full context first, lengths and retentions in ascending order."""
        name, _, kept = self.method.partition(" ")
        budget = float(kept.split()[0]) if kept else 0.0
        return self.task, self.later, self.length or 0, self.method != FULL_CONTEXT, name, budget

    @property
    def metric(self) -> str:
        """The name of the main metric."""
        return next(iter(self.samples[0].scores))

    @property
    def mean(self) -> float:
        """The mean of the main metric."""
        return fmean(each.scores[self.metric] for each in self.samples)


def load_cells(folder: Path) -> list[Cell]:
    """Read all cells of a folder, in the order of a table; a damaged one is a ValueError."""
    found = [_read_cell(file) for file in (folder / CELLS).glob("*.json")]
    return sorted(found, key=lambda cell: cell.order)


def _read_cell(file: Path) -> Cell:
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
        samples = tuple(Sample(**each) for each in read.pop("samples"))
        cell = Cell(**read, samples=samples)
        if cell.file != file.name or len({each.document for each in samples}) < len(samples):
            raise ValueError("it does not hold what its name says")
        if len({tuple(each.scores) for each in samples}) != 1 or not samples[0].scores:
            raise ValueError("its samples must have the same scores")
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{file} is damaged ({error}); remove it to have it answered again"
        ) from None
    return cell


def save_cell(folder: Path, cell: Cell) -> None:
    """Write a cell's file, all of it or nothing."""
    write_all(folder / CELLS, {cell.file: as_json(attrs.asdict(cell))})


def check_same(folder: Path, settings: Mapping[str, Any]) -> None:
    """Raise ValueError if a folder has other settings; a model may have another name."""
    there, model = read_settings(folder) or dict(settings), "model's content"
    if there.get(model) == settings[model]:
        there["model"] = settings["model"]
    unlike = [
        f"{name} was {there.get(name)}, got {settings.get(name)}"
        for name in {**there, **settings}
        if there.get(name) != settings.get(name)
    ]
    if unlike:
        raise ValueError(
            f"out must be a new folder, or one of the same settings, got {folder}, where "
            f"{'; '.join(unlike)}; give another --out"
        )


@contextmanager
def opened(folder: Path, settings: Mapping[str, Any]) -> Iterator[dict[str, Cell]]:
    """Lock a folder for this process, new or to be extended; yield its cells by file name.

    Raises:
        ValueError: See `check_same`; or another process writes to it, or a cell is damaged.
    """
    check_same(folder, settings)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / LOCK, blocking=False):
            if not (folder / SETTINGS).exists():
                write_all(folder, {SETTINGS: as_json(settings)})
            yield {cell.file: cell for cell in load_cells(folder)}
    except Timeout:
        raise ValueError(
            f"out must be a folder that no other process writes to, got {folder}, which another "
            "kvpolicy eval is filling"
        ) from None


def read_settings(folder: Path) -> dict[str, Any] | None:
    """Return the settings of a folder, or None if it is new; damaged ones are a ValueError."""
    check_folder(folder, (SETTINGS,))
    file = folder / SETTINGS
    if not file.exists() and (folder / CELLS).exists():
        raise ValueError(f"out {folder} has {CELLS} but no {SETTINGS}; give another --out")
    if not file.exists():
        return None
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if found["format"] != FORMAT or not isinstance(found["threads"], int):
            raise ValueError(f"its format must be {FORMAT}")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is damaged ({error!r}); give another --out") from None
    return found


def settings_of(loaded: Loaded, *, chat: bool, batch_size: int) -> dict[str, Any]:
    """Return what must be the same for all cells of a folder: the model and the machine.

    A model's content is a hash of its configuration, some numbers of each weight, and its words.
    """
    config = loaded.model.config.to_dict()
    for name in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        config.pop(name, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in loaded.model.named_parameters():
        numbers = weight.detach().flatten()[:16].float().tolist()
        digest.update(f"{name} {tuple(weight.shape)} {numbers}".encode())
    digest.update(json.dumps(loaded.tokenizer.get_vocab(), sort_keys=True).encode())
    place = environment(loaded.model.device)
    versions = {**place["versions"], "lm_eval": version("lm_eval")}
    place["machine"].pop("cpus")
    return {
        "format": FORMAT,
        "model": loaded.name,
        "model's content": digest.hexdigest()[:16],
        "dtype": loaded.dtype,
        "chat": chat,
        "batch size": batch_size,
        **place["machine"],
        **{f"version of {name}": each for name, each in versions.items()},
    }
