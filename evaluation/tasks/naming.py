"""Find a task by its name, or a file of questions; without torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvpolicy.names import said

if TYPE_CHECKING:
    from kvpolicy.evaluation.tasks.task import Task

NAMES = ("needles", "lines", "pairs", "completion", "continuation")


def check_task(name: str) -> None:
    """Raise ValueError, with the nearest name and all, unless a name is a task or a file."""
    if name not in NAMES and not Path(name).is_file():
        got = said(name, NAMES, repr(name))
        raise ValueError(
            f"task must be {', '.join(NAMES)} or a file of JSON lines that exists, got {got}"
        )


def task_named(name: str) -> Task:
    """Return a task by its name, one of `NAMES`, or the questions of a file; see `check_task`."""
    check_task(name)
    from kvpolicy.evaluation.tasks.completion import Completion
    from kvpolicy.evaluation.tasks.continuation import Continuation
    from kvpolicy.evaluation.tasks.files import Files
    from kvpolicy.evaluation.tasks.lines import Lines
    from kvpolicy.evaluation.tasks.needles import Needles
    from kvpolicy.evaluation.tasks.pairs import Pairs

    made: dict[str, type[Task]] = {
        task.name: task for task in (Needles, Lines, Pairs, Completion, Continuation)
    }
    return made[name]() if name in made else Files(Path(name))
