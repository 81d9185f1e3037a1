"""How long work tells what it is at: a callable, so that the library needs no terminal."""

from __future__ import annotations

from collections.abc import Callable

# Called with the stage's name, the steps done and the steps in all.
Progress = Callable[[str, int, int], None]


def silent(stage: str, done: int, total: int) -> None:
    """Tell nobody."""
