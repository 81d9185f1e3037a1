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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("compare -p snapkv,", "--policy must be names separated by commas, got 'snapkv,'"),
        ("eval --tasks , --out x", "--tasks must be names separated by commas, got ','"),
        ("eval --tasks a --lengths 1,,2 --out x", "--lengths must be numbers of tokens"),
        ("estimate --config phi-4 --context 9 --decoding-tokens 0",
         "--decoding-tokens must be at least 1, got 0"),
        ("estimate --config phi-4 --context 9 --decoding-tokens 9 --decoding-every 0",
         "--decoding-every must be at least 1, got 0"),
        ("compare --decoding-tokens 0", "--decoding-tokens must be at least 1, got 0"),
        ("generate --prompt-file FILE --decoding-tokens 9 --decoding-every -1",
         "--decoding-every must be at least 1, got -1"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_before_a_model_is_loaded(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: str, said: str
) -> None:
    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("a model is loaded first")

    monkeypatch.setattr(terminal, "load", loaded)
    status, shown, err = run(*arguments.replace("FILE", __file__).split())
    assert (status, shown) == (1, "")
    assert said in err
