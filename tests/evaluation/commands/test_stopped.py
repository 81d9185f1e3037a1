"""What is done is not lost: Ctrl-C keeps rows, and places are tried before anything is measured."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.evaluation.commands.work import terminal
from kvpolicy.evaluation.comparison import rows
from kvpolicy.evaluation.comparison.accuracy import measure_accuracy
from tests.evaluation.support import Run

QUICK = ("--context", 64, "--count", 2, "--rounds", 1, "--answer-tokens", 2, "--threads", 1)
QUICK += ("--speed-context", 64)
ASKED = ("compare", "-p", "snapkv,h2o,tova", "--rate", 0.5, *QUICK)


def ended_at(label: str, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """End a comparison while a contender answers."""

    def ending(*args: Any, stage: str, **kwargs: Any) -> Any:
        if stage.endswith(label):
            raise error
        return measure_accuracy(*args, stage=stage, **kwargs)

    monkeypatch.setattr(rows, "measure_accuracy", ending)


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [(KeyboardInterrupt(), 130, "interrupted"), (OSError("the disk is gone"), 1, "the disk is")],
)
def test_rows_that_are_done_are_kept(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    status: int,
    said: str,
) -> None:
    ended_at("h2o 0.5", error, monkeypatch)
    out = tmp_path / "results"
    found, shown, err = run(*ASKED, "--out", out)
    assert found == status
    assert err.strip().startswith(f"error: {said}")
    assert len(err.strip().splitlines()) == 1
    lines = shown.splitlines()
    assert [line.split()[0] for line in lines if line.startswith(("full", "snap", "h2o", "tova"))] \
        == ["full_context", "snapkv"]  # fmt: skip
    note = "Unfinished: stopped after 2 of 4 rows, without h2o 0.5, tova 0.5."
    assert note in lines
    assert lines[-1] == f"written to {out}: compare.json, compare.png"
    assert all(len(line) <= 80 for line in lines[3:-1])
    record = json.loads((out / "compare.json").read_text())
    assert record["finished"] is False
    assert note in record["notes"]
    assert [row["policy"] for row in record["rows"]] == ["full_context", "snapkv"]
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_one_row_is_kept_as_well_and_none_is_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended_at("snapkv 0.5", KeyboardInterrupt(), monkeypatch)
    status, shown, _ = run(*ASKED, "--out", tmp_path / "one")
    assert status == 130
    assert "Unfinished: stopped after 1 of 4 rows" in shown
    assert len(json.loads((tmp_path / "one/compare.json").read_text())["rows"]) == 1
    ended_at("full_context", KeyboardInterrupt(), monkeypatch)
    status, shown, err = run(*ASKED, "--out", tmp_path / "none")
    assert (status, err) == (130, "error: interrupted\n")
    assert "Unfinished" not in shown
    assert not (tmp_path / "none").exists()


def test_a_finished_comparison_says_so(run: Run, tmp_path: Path) -> None:
    status, shown, _ = run("compare", "-p", "snapkv", "-r", 0.5, *QUICK, "--out", tmp_path)
    assert status == 0
    assert "Unfinished" not in shown
    assert json.loads((tmp_path / "compare.json").read_text())["finished"] is True


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
        ("eval --tasks a --lengths 1,,2 --out x", "--lengths must be names separated by commas"),
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
