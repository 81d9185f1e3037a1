"""The type of progress callbacks: functions that receive a progress message."""

from collections.abc import Callable

# Called with the stage's name, the steps done and the steps in all.
Progress = Callable[[str, int, int], None]


def silent(stage: str, done: int, total: int) -> None:
    """Ignore a progress report: the default for functions that report progress."""
