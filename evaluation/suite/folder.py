"""Keep what was answered in a folder: a file of settings, and a file for each cell.

A cell is a task at one length under one policy. Its file is replaced as a whole whenever more of it
is answered, so that a kill loses what was being asked and no more.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

import attrs

from kvpolicy.evaluation.defaults import FULL_CONTEXT
from kvpolicy.evaluation.models import Loaded
from kvpolicy.evaluation.results import as_json, check_folder, environment, write_all

SETTINGS, CELLS = "settings.json", "cells"
FILES = ("table.md", "table.csv", "picture.png")
FORMAT = 1


@attrs.frozen
class Sample:
    """The answer to one document, with a hash of its prompt, its scores and `RequestCosts`.

    The task's main metric is the first score. Costs are the largest request's; seconds are of all.
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
    """A task at one length (None: its own) under a policy (``method`` is its label)."""

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
        once = len({each.document for each in samples}) == len(samples)
        if cell.file != file.name or not once or len({tuple(it.scores) for it in samples}) != 1:
            raise ValueError("it does not hold what was written")
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{file} is damaged ({error}); remove it to have it answered again"
        ) from None
    return cell


def save_cell(folder: Path, cell: Cell) -> None:
    """Write a cell's file, all of it or nothing, so that a kill leaves no half."""
    write_all(folder / CELLS, {cell.file: as_json(attrs.asdict(cell))})


def read_settings(folder: Path) -> dict[str, Any] | None:
    """Return the settings of a folder, or None if it is new; damaged ones are a ValueError."""
    check_folder(folder, (SETTINGS, *FILES))
    file = folder / SETTINGS
    if not file.exists():
        if (folder / CELLS).exists():
            raise ValueError(f"out {folder} has {CELLS} but no {SETTINGS}; give another --out")
        return None
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if found["format"] != FORMAT or not isinstance(found["threads"], int):
            raise ValueError(f"its format must be {FORMAT}")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is damaged ({error!r}); give another --out") from None
    return found


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


def settings_of(loaded: Loaded, *, chat: bool, batch_size: int) -> dict[str, Any]:
    """Return what all cells of a folder share: the machine, and a hash of the model's content."""
    config = loaded.model.config.to_dict()
    for name in ("_name_or_path", "transformers_version", "dtype", "torch_dtype"):
        config.pop(name, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, weight in loaded.model.named_parameters():
        numbers = weight.detach().flatten()[:16].float().tolist()
        digest.update(f"{name} {tuple(weight.shape)} {numbers}".encode())
    digest.update(json.dumps(loaded.tokenizer.get_vocab(), sort_keys=True).encode())
    place = environment(loaded.model.device)
    place["versions"]["lm_eval"] = version("lm_eval")
    place["machine"].pop("cpus")
    return {
        "format": FORMAT,
        "model": loaded.name,
        "model's content": digest.hexdigest()[:16],
        "dtype": loaded.dtype,
        "chat": chat,
        "batch size": batch_size,
        **place["machine"],
        **{f"version of {name}": each for name, each in place["versions"].items()},
    }
