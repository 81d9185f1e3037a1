"""Result files: all or none, and where they may go."""

from pathlib import Path

import pytest
import torch

from kvpolicy.evaluation import results
from kvpolicy.evaluation.cli import main
from kvpolicy.evaluation.results import check_folder, default_threads, environment, write_all


def test_files_are_written_and_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "deeper"
    write_all(folder, {"a": b"1", "b": b"2"})
    write_all(folder, {"a": b"3"})
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"a": b"3", "b": b"2"}


def test_failure_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_all(tmp_path, {"a": b"old"})
    write_bytes = Path.write_bytes

    def full_disk(path: Path, content: bytes) -> int:
        if path.name == "b":
            raise OSError("No space left on device")
        return write_bytes(path, content)

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_all(tmp_path, {"a": b"new", "b": b"new"})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"old"}


def test_folder_must_not_be_a_file_nor_lie_in_one(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for folder in (file, file / "inside"):
        with pytest.raises(ValueError, match="is a file"):
            check_folder(folder)
    check_folder(tmp_path / "not" / "yet")
    assert not (tmp_path / "not").exists()


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["analyze"], "analyze.png"),
        (["calibrate"], "calibrate.json"),
        (["compare"], "compare.json"),
    ],
)
def test_a_folder_in_a_results_place_is_said_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str], name: str
) -> None:
    (tmp_path / name).mkdir()
    assert main([*command, "--out", str(tmp_path), "--model", "no/such"]) == 1
    said = (
        f"error: out must not contain a folder named {name}, since a file of results has this "
        f"name, got the folder {tmp_path / name}\n"
    )
    assert capsys.readouterr().err == said
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_environment_names_versions_and_threads() -> None:
    found = environment(torch.device("cpu"))
    assert found["versions"]["torch"] == torch.__version__
    assert found["machine"]["threads"] == torch.get_num_threads()
    assert found["machine"]["device"] == "cpu"
    assert found["machine"]["processor"]


@pytest.mark.parametrize(
    ("asked", "threads"),
    [("3", 3), ("2,1", 2), ("64", 8), (None, 4), ("", 4), ("0", 4), ("many", 4)],
)
def test_threads_are_what_openmp_is_told(
    asked: str | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an idle machine of eight processors, six of them for this process."""
    monkeypatch.setattr(results.os, "getloadavg", lambda: (0.4, 9.0, 9.0))
    monkeypatch.setattr(results.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(results, "cpu_count", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert default_threads() == threads


@pytest.mark.parametrize(("load", "threads"), [(0.0, 2), (0.4, 2), (0.6, 1), (1.4, 1), (9.0, 1)])
def test_threads_leave_busy_processors_alone(
    load: float, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "cpu_count", lambda: 2)
    monkeypatch.setattr(results.os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert default_threads() == threads
