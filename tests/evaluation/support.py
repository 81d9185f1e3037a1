"""What tests of commands share."""

from collections.abc import Callable
from pathlib import Path

# A command with its arguments: exit status, standard output, standard error.
Run = Callable[..., tuple[int, str, str]]


def fails(result: tuple[int, str, str], status: int, said: str) -> None:
    """One clear line on stderr, nothing on stdout, no traceback."""
    assert result[:2] == (status, "")
    lines = [line for line in result[2].splitlines() if line.strip()]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert said in lines[0]


NEEDLE = Path(__file__).parents[1] / "needle/weights"
"""The folder of a small trained model, whose vocabulary is f1, f2, ... and s1, s2, ..."""
