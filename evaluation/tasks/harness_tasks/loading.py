"""Load tasks of lm-evaluation-harness by name, before any model is loaded."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lm_eval.tasks
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from kvpolicy.checks import check_count
from kvpolicy.evaluation.tasks.harness_tasks.documents import (
    Wanted,
    with_documents,
    without_downloads,
)

HARNESS = Path(lm_eval.tasks.__file__).parent
# Tried first, since listing the harness's thousands of tasks takes many seconds.
FOLDER = Path(__file__).parents[1]
FOLDERS = (HARNESS / "ruler", HARNESS / "longbench", FOLDER)
DEFAULT_LENGTHS = (4096,)


class LocalTaskManager(TaskManager):  # type: ignore[misc]
    """A task manager of the harness that also finds documents in a local folder.

    Args:
        data: The folder; None for the harness's own ways.
        lengths: Prompt lengths of the tasks that have one.
        tokenizer: A tokenizer or its name.
        include: Further folders with tasks.
        everything: Whether all tasks of the harness are listed.
    """

    def __init__(
        self,
        data: Path | None,
        lengths: Sequence[int],
        tokenizer: Any,
        include: Sequence[Path],
        *,
        everything: bool,
    ) -> None:
        self.data, self.lengths, self.tokenizer = data, tuple(lengths), tokenizer
        self.include, self.everything = tuple(include), everything
        metadata: dict[str, Any] = {"max_seq_lengths": list(lengths)}
        if tokenizer is not None:
            metadata["tokenizer"] = getattr(tokenizer, "name_or_path", tokenizer)
        if data is not None:
            metadata["data"] = str(data)
        folders = (FOLDER,) if everything else FOLDERS
        super().__init__(
            include_path=[*folders, *include], include_defaults=everything, metadata=metadata
        )


def task_manager(
    data: Path | None = None,
    lengths: Sequence[int] = DEFAULT_LENGTHS,
    tokenizer: Any = None,
    *,
    include: Sequence[Path] = (),
    everything: bool = False,
) -> LocalTaskManager:
    """Make a task manager for the harness's long-context tasks and this package's tasks.

    Args:
        data: A folder with local data: ``longbench/*.jsonl``, ``essays/*.txt``, ``ruler/*.jsonl``.
            What a task needs must be there. None: the harness fetches what it needs.
        lengths: Prompt lengths in tokens, of the tasks that have one.
        tokenizer: That of the model, a tokenizer or its name, for the tasks that have lengths.
        include: Further folders with tasks, as the harness's ``--include_path``.
        everything: Whether all of the harness's tasks are listed, which takes a while; without,
            `load_tasks` lists them when a name is not among RULER, LongBench and this package's.

    Raises:
        ValueError: ``data`` is no folder, or a length is below 1.
    """
    if data is not None and not Path(data).is_dir():
        raise ValueError(f"data must be a folder, got {data}")
    for length in lengths:
        check_count("lengths", length, minimum=1)
    folder = None if data is None else Path(data)
    return LocalTaskManager(folder, lengths, tokenizer, include, everything=everything)


def load_tasks(
    names: Sequence[str],
    manager: LocalTaskManager,
    lengths: Sequence[int] | None = None,
    tokenizer: Any = None,
    limit: int | None = None,
) -> dict[str, Task]:
    """Load harness tasks by name, with their documents.

    What each was made of is in its configuration's metadata, under ``"made_of"``.

    Args:
        names: Of tasks, groups or tags.
        manager: From `task_manager`.
        lengths: In place of the manager's.
        tokenizer: In place of the manager's.
        limit: Documents of each task, at each length where it has some; None for all.

    Returns:
        By name, in the order of the names; a group's tasks one after the other.

    Raises:
        ValueError: A name is unknown (says which are near), the data lacks what a task needs, or
            a task that has lengths has no tokenizer.
    """
    if limit is not None:
        check_count("limit", limit, minimum=1)
    manager = knowing(names, manager)
    wanted = Wanted(
        manager.data,
        tuple(lengths or manager.lengths),
        manager.tokenizer if tokenizer is None else tokenizer,
        limit,
    )
    tasks: dict[str, Task] = {}
    for name in dict.fromkeys(leaf for each in names for leaf in _leaves(each, manager)):
        config = with_documents(_config(name, manager), wanted)
        loaded = manager.load([name if config is None else config])["tasks"]
        if config is None and limit is not None:
            for task in loaded.values():
                _cut(task, limit)
        tasks |= loaded
    return tasks


def knowing(names: Sequence[str], manager: LocalTaskManager) -> LocalTaskManager:
    """Return a harness task manager that knows all given task names.

    Args:
        names: Of tasks, groups or tags.
        manager: From `task_manager`; returned if it knows them.

    Raises:
        ValueError: No manager knows them; tells all that are unknown, and which names are near.
    """
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown and not manager.everything:
        manager = task_manager(
            manager.data,
            manager.lengths,
            manager.tokenizer,
            include=manager.include,
            everything=True,
        )
        unknown = [name for name in unknown if name not in manager.all_tasks]
    got = []
    for name in unknown:
        near = difflib.get_close_matches(name, manager.all_tasks, n=5, cutoff=0.5)
        got.append(f"{name!r}; near: {', '.join(near) or 'none'}")
    if got:
        raise ValueError(
            "tasks must be names of the harness's tasks, groups or tags, got " + "; and ".join(got)
        )
    return manager


def _leaves(name: str, manager: TaskManager) -> Iterator[str]:
    """Yield the names of single tasks behind a name, which may be that of a group or tag."""
    entry = manager.task_index[name]
    kind = entry.kind.name
    members = sorted(entry.tags) if kind == "TAG" else (entry.cfg or {}).get("task")
    # The harness itself loads members with settings of their own, with their group.
    if kind in ("TAG", "GROUP") and all(isinstance(each, str) for each in members or ()):
        for each in members or ():
            yield from _leaves(each, manager)
    else:
        yield name


def _config(name: str, manager: TaskManager) -> dict[str, Any]:
    """Read a task's YAML configuration; empty for a group, a tag or a task without a file."""
    entry = manager.task_index[name]
    if entry.yaml_path is None or entry.kind.name != "TASK":
        return {}
    with without_downloads():
        config: dict[str, Any] = load_yaml(entry.yaml_path)
    return config


def _cut(task: Task, limit: int) -> None:
    """Keep only the first documents of a loaded harness task."""
    split = task.config.test_split or task.config.validation_split
    if split is not None and len(task.dataset[split]) > limit:
        task.dataset[split] = task.dataset[split].select(range(limit))
