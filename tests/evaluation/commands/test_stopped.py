"""What is wrong is said before a model is loaded; places are tried before anything is measured."""

from pathlib import Path
from typing import Any

import pytest

from kvpolicy.evaluation.commands import terminal
from tests.evaluation.support import Run


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that takes no files")
@pytest.mark.parametrize(
    "arguments",
    [
        ("compare", "--out", "/proc/x"),
        ("calibrate", "--out", "/proc/x"),
        ("analyze", "--out", "/proc/x"),
        ("eval", "--tasks", "needle_one_hop", "--out", "/proc/x"),
        ("estimate", "--config", "phi-4", "--context", "9", "--json", "/proc/x"),
    ],
)
def test_places_are_tried_first(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    """Permissions alone do not tell: the superuser has all of them in /proc."""

    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("a model is loaded before the place is tried")

    monkeypatch.setattr(terminal, "load", loaded)
    status, shown, err = run(*arguments)
    assert (status, shown) == (1, "")
    assert "must be a place that can be written to, got /proc/x" in err
