"""Names of models: paths that are none are refused at once; all else is left to the Hub."""

from pathlib import Path

import pytest

from kvpolicy.evaluation import model_names
from kvpolicy.evaluation.model_names import check_model_name
from tests.evaluation.commands.test_light import run_lines


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of models, in the current folder and in the user's own."""
    (tmp_path / "models" / "one").mkdir(parents=True)
    (tmp_path / "models" / "one" / "config.json").write_text("{}")
    (tmp_path / "models" / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(
        model_names, "cached_config", lambda name: Path("seen") if name == "models/seen" else None
    )


@pytest.mark.parametrize("name", ["gpt2", "owner/model", "models/one", "models/seen"])
def test_takes_folders_and_names_of_the_hub(name: str) -> None:
    assert check_model_name(name) == name


def test_home_is_written_out(tmp_path: Path) -> None:
    assert check_model_name("~/models/one") == str(tmp_path / "models" / "one")


@pytest.mark.parametrize("name", ["./x", "/x", "~/x", "../x", "models/x/y", "a b"])
def test_refuses_paths_that_are_none(name: str) -> None:
    with pytest.raises(ValueError, match="does not exist; give a folder"):
        check_model_name(name)


def test_refuses_what_a_folder_lacks() -> None:
    with pytest.raises(ValueError, match="models/x does not exist in the local folder models"):
        check_model_name("models/x")
    with pytest.raises(ValueError, match="models/empty must hold a config.json"):
        check_model_name("models/empty")


def test_the_command_refuses_them_without_imports_and_network() -> None:
    lines = [
        ["check", "./x"],
        ["check", "models/x"],
        ["compare", "--model", "~/x"],
        ["eval", "-t", "x", "--out", "o", "--model", "/x"],
        ["generate", "--prompt", "x", "--model", "./x"],
    ]
    statuses, heavy, said = run_lines(lines)
    assert (statuses, heavy) == ([1] * len(lines), [])
    assert said.count("does not exist") == len(lines)
