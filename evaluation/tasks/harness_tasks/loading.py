"""Loading tasks of lm-evaluation-harness: by name, before any model is loaded."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager

TASKS = Path(__file__).parents[1]


def task_manager(
    data: Path | None = None, lengths: Sequence[int] = (), tokenizer: Any = None
) -> TaskManager:
    """The harness's tasks and this package's.

    Args:
        data: A folder with local data; None for the harness's own ways.
        lengths: Prompt lengths of the tasks that have one, in tokens.
        tokenizer: That of the model, a tokenizer or its name.
    """
    metadata: dict[str, Any] = {}
    if lengths:
        metadata["max_seq_lengths"] = list(lengths)
    if tokenizer is not None:
        metadata["tokenizer"] = getattr(tokenizer, "name_or_path", tokenizer)
    return TaskManager(include_path=TASKS, metadata=metadata)


def load_tasks(
    names: Sequence[str],
    manager: TaskManager,
    lengths: Sequence[int] = (),
    tokenizer: Any = None,
    limit: int | None = None,
) -> dict[str, Task]:
    """Load tasks, their prompts generated or read.

    Args:
        names: Of tasks, groups or tags.
        manager: From `task_manager`.
        lengths: As of the manager.
        tokenizer: As of the manager.
        limit: Samples of each task and length; None for all.

    Raises:
        ValueError: A name is unknown; says which are near.
    """
    known = manager.all_tasks
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=5, cutoff=0.5)
            raise ValueError(
                f"tasks must be names of the harness's tasks, groups or tags, got {name!r}; near: "
                f"{', '.join(near) or 'none'}"
            )
    tasks: dict[str, Task] = manager.load(list(names))["tasks"]
    return tasks
