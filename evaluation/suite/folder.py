"""Keep what was answered in a folder: a file of settings, and a file for each cell.

A cell is a task at one length under one policy. Its file is replaced as a whole whenever more of it
is answered, so that a kill loses what was being asked and no more. A folder is of one model on one
machine; what it may be extended by is other cells, and more documents in each.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
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
    """The answer to one document, with its scores and costs.

    Args:
        document: Its number in its task and length, from 0.
        prompt: A hash of its prompt.
        answer: What was scored.
        scores: By metric, the task's main metric first.
        tokens_seen: Tokens of the prompt.
        tokens_kept: Tokens kept of it, the mean over layers and heads.
        bytes_held: Bytes of their keys and values.
        prefill_seconds: Seconds to read the prompt; in a batch, its share of them.
        total_seconds: Seconds to read and answer it, shared in the same way.
    """

    document: int
    prompt: str
    answer: str
    scores: dict[str, float]
    tokens_seen: int
    tokens_kept: float
    bytes_held: int
    prefill_seconds: float
    total_seconds: float


@attrs.frozen
class Cell:
    """A task at one length under one policy, with what was answered.

    Args:
        task: The task's name.
        length: Tokens that its prompts were made for; None for prompts of the task's own length.
        later: Whether the question is asked after the policy has chosen.
        method: The policy and its retention, such as ``"snapkv 0.1"``.
        policy: The policy as it is written in Python, with all its parameters.
        samples: By document.
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
        """Where it stands in a table: full context first, rates and lengths in ascending order."""
        name, _, kept = self.method.partition(" ")
        budget = float(kept.split()[0]) if kept else 0.0
        is_policy = self.method != FULL_CONTEXT
        return self.task, self.later, self.length or 0, is_policy, name, budget, self.method


def load_cells(folder: Path) -> list[Cell]:
    """Read all cells of a folder, in the order of a table.

    Raises:
        ValueError: A file is damaged; says which one.
    """
    files = sorted((folder / CELLS).glob("*.json"))
    return sorted((_read_cell(file) for file in files), key=lambda cell: cell.order)


def _read_cell(file: Path) -> Cell:
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
        samples = tuple(Sample(**each) for each in read.pop("samples"))
        cell = Cell(**read, samples=samples)
        numbers = [each.document for each in samples]
        if cell.file != file.name or not samples or len(set(numbers)) < len(numbers):
            raise ValueError("it does not hold what its name says")
        if any(list(each.scores) != list(samples[0].scores) for each in samples):
            raise ValueError("its samples have different scores")
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{file} is damaged ({error}); remove it to have it answered again"
        ) from None
    return cell


def save_cell(folder: Path, cell: Cell) -> None:
    """Write a cell's file, all of it or nothing."""
    write_all(folder / CELLS, {cell.file: as_json(attrs.asdict(cell))})


@contextmanager
def opened(folder: Path, settings: Mapping[str, Any]) -> Iterator[dict[str, Cell]]:
    """Lock a folder for this process, new or to be extended; yield its cells by file name.

    Raises:
        ValueError: It is of other settings, another process writes to it, or a file is damaged.
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
    """Return the settings of a folder; None if it is new.

    Raises:
        ValueError: The folder cannot hold results, or its settings are damaged.
    """
    check_folder(folder, (SETTINGS,))
    file = folder / SETTINGS
    if not file.exists():
        if (folder / CELLS).exists():
            raise ValueError(f"out {folder} has {CELLS} but no {SETTINGS}; give another --out")
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise ValueError(f"its format is {found['format']}, not {FORMAT}")
        return dict(found)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is damaged ({error}); give another --out") from None


def check_same(folder: Path, settings: Mapping[str, Any]) -> None:
    """Check that a folder of results is new, or one that these settings may extend.

    Raises:
        ValueError: It is not; says what differs.
    """
    there = read_settings(folder)
    if there is None:
        return
    own, its = _flat(there), _flat(settings)
    unlike = [
        f"{name} was {own.get(name)}, got {its.get(name)}"
        for name in {**own, **its}
        if own.get(name) != its.get(name)
    ]
    if own.get("model's content") == its.get("model's content"):
        unlike = [each for each in unlike if not each.startswith("model was")]
    if unlike:
        raise ValueError(
            f"out must be a new folder, or one of the same settings, got {folder}, where "
            f"{'; '.join(unlike)}; give another --out"
        )


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    versions = {f"version of {name}": it for name, it in settings.get("versions", {}).items()}
    machine = {name: it for name, it in settings.get("machine", {}).items() if name != "cpus"}
    others = ("versions", "machine", "format")
    return {name: it for name, it in settings.items() if name not in others} | versions | machine


def settings_of(loaded: Loaded, *, chat: bool, batch_size: int) -> dict[str, Any]:
    """Return what must be the same for all cells of a folder: the model and the machine."""
    from importlib.metadata import version

    found = environment(loaded.model.device)
    found["versions"]["lm_eval"] = version("lm_eval")
    return {
        "format": FORMAT,
        "model": loaded.name,
        "model's content": fingerprint(loaded),
        "dtype": loaded.dtype,
        "chat": chat,
        "batch size": batch_size,
        **found,
    }


def fingerprint(loaded: Loaded) -> str:
    """Return a hash of a model's configuration, some numbers of each weight, and its vocabulary.

    It does not depend on the model's name and place.
    """
    config = loaded.model.config.to_dict()
    for name in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        config.pop(name, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in loaded.model.named_parameters():
        numbers: Sequence[float] = weight.detach().flatten()[:16].float().tolist()
        digest.update(f"{name} {tuple(weight.shape)} {numbers}".encode())
    digest.update(json.dumps(loaded.tokenizer.get_vocab(), sort_keys=True).encode())
    return digest.hexdigest()[:16]
