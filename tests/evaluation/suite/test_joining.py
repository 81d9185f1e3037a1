"""Several folders in one report: what is the same is joined, and what contradicts is refused."""

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvpolicy.evaluation.suite import Results, Summary, load, load_joined, write_report
from kvpolicy.evaluation.suite.folder import SAMPLES, SETTINGS
from kvpolicy.evaluation.suite.joining import differences
from tests.evaluation.suite.test_extending import FIRST, MORE, asked_of


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """SnapKV in the one and FastKV in the other, both with full context."""
    found = [tmp_path / name for name in ("a", "b")]
    for folder, policy in zip(found, ("snapkv", "fastkv"), strict=True):
        asked_of(folder, FIRST | {"policies": (policy,)})
    return found


def change(folder: Path, line: int | None = None, **values: Any) -> None:
    """Change what a folder's settings or one of its lines say; all lines where it is -1."""
    if line is None:
        file = folder / SETTINGS
        read = json.loads(file.read_text())
        for name, value in values.items():
            inner = read if name in ("versions", "machine", "methods") else read["settings"]
            inner[name] = value
        file.write_text(json.dumps(read))
        return
    file = folder / SAMPLES
    lines = file.read_text().splitlines()
    for at in range(len(lines)) if line == -1 else [line]:
        lines[at] = json.dumps(json.loads(lines[at]) | values)
    file.write_text("".join(f"{each}\n" for each in lines))


def told(results: Results) -> object:
    figures = Summary.of(results).figures
    return {cell: attrs.asdict(each) for cell, each in figures.items()}


def test_joined_folders_are_as_one(folders: list[Path], tmp_path: Path) -> None:
    asked_of(tmp_path / "once", FIRST | {"policies": ("snapkv", "fastkv")})
    joined = load_joined(folders)
    assert told(joined) == told(load(tmp_path / "once"))
    assert joined.description == load(tmp_path / "once").description
    assert [(each.folder, each.samples) for each in joined.sources] == [
        (folder, 6) for folder in folders
    ]
    assert len(joined.samples) == 9  # full context, which both have, once
    assert load_joined(folders[:1]) == load(folders[0])


def test_three_of_other_tasks_lengths_and_samples(folders: list[Path], tmp_path: Path) -> None:
    third = tmp_path / "c"
    asked_of(third, FIRST | MORE["tasks"] | MORE["lengths"] | MORE["limit"])
    joined = load_joined([*folders, third])
    asked_of(folders[0], FIRST | MORE["tasks"] | MORE["lengths"] | MORE["limit"])
    asked_of(folders[0], FIRST | {"policies": ("fastkv",)})
    one = load(folders[0])
    assert told(joined) == told(one)
    assert len(joined.samples) == len(one.samples)


def test_halves_of_a_cell_are_joined(tmp_path: Path) -> None:
    """A run that was killed on one machine and gone on with on another."""
    asked_of(tmp_path / "whole", FIRST)
    for name in ("a", "b"):
        asked_of(tmp_path / name, FIRST)
        lines = (tmp_path / name / SAMPLES).read_text().splitlines(keepends=True)
        kept = lines[:2] if name == "a" else lines[2:]
        (tmp_path / name / SAMPLES).write_text("".join(kept))
    assert not all(each.finished for each in Summary.of(load(tmp_path / "b")).figures.values())
    joined = load_joined([tmp_path / "a", tmp_path / "b"])
    assert told(joined) == told(load(tmp_path / "whole"))


def test_circumstances_are_listed_and_no_reason_to_refuse(
    folders: list[Path], tmp_path: Path
) -> None:
    change(folders[1], versions={"kvpolicy": "1", "torch": "2"}, model="elsewhere", threads=8)
    change(folders[1], machine={"processor": "made up", "gpu": "H100", "cpus": 64})
    change(folders[1], -1, total_seconds=99.0)
    joined = load_joined(folders)
    first, second = folders
    said = [
        f"threads: 1 in {first}, 8 in {second}",
        f"version of torch: not given in {first}, 2 in {second}",
        f"gpu: not given in {first}, H100 in {second}",
        f"model: stand-in in {first}, elsewhere in {second}",
    ]
    assert differences(joined.sources) == said
    page, table = write_report(joined, tmp_path / "report.html")
    html, rows = page.read_text(), table.read_text().splitlines()
    for each in said:
        assert f"<li>{each}</li>" in html
        assert f"- {each}" in rows
    assert rows[0] == f"| folder | {folders[0]} | {folders[1]} |"
    assert "| machine | made up, 2 CPUs | H100, made up, 64 CPUs |" in rows
    assert "| torch | \N{EN DASH} | 2 |" in rows
    assert html.index('class="origin"') < html.index("<h2>Scores</h2>")
    assert '<td class="open">H100, made up, 64 CPUs</td>' in html
    assert "from 2 folders" in html


def test_versions_and_machine_of_one_folder_are_at_the_top(
    folders: list[Path], tmp_path: Path
) -> None:
    page, table = write_report(load(folders[0]), tmp_path / "report.html")
    html, rows = page.read_text(), table.read_text().splitlines()
    before_scores = html[: html.index("<h2>Scores</h2>")]
    for name, value in (("machine", "made up, 2 CPUs"), ("kvpolicy", "1"), ("threads", "1")):
        assert f"<dt>{name}</dt><dd>{value}</dd>" in before_scores
        assert rows.index(f"| {name} | {value} |") < 10
    assert "folders differ" not in html


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"fingerprint": "g"}, "fingerprint was f, got g"),
        ({"chat_template": True}, "chat_template was False, got True"),
        ({"dtype": "bfloat16"}, "dtype was not given, got bfloat16"),
    ],
)
def test_other_models_and_ways_to_ask_are_refused(
    folders: list[Path], values: dict[str, object], said: str
) -> None:
    change(folders[1], **values)
    with pytest.raises(ValueError, match=f"of the same model, asked in the same way.*{said}"):
        load_joined(folders)


@pytest.mark.parametrize(
    "values",
    [
        {"prediction": "other"},
        {"scores": {"match": 0.5, "other": 0.25}},
        {"tokens_kept": 3.0},
        {"bytes_held": 3},
        {"references": ["no"]},
    ],
)
def test_rows_that_contradict_are_refused(folders: list[Path], values: dict[str, object]) -> None:
    change(folders[1], 1, **values)
    (name,) = values
    said = f"of needle 256, question with, full_context, document 1, {name} was "
    with pytest.raises(ValueError, match=said):
        load_joined(folders)
    change(folders[1], -1, prediction="x")
    with pytest.raises(ValueError, match="must not contradict each other"):
        load_joined(folders)


def test_of_many_contradictions_some_are_shown(tmp_path: Path) -> None:
    for name in ("a", "b"):
        asked_of(tmp_path / name, FIRST)
    change(tmp_path / "b", -1, prediction="x")
    with pytest.raises(ValueError, match="; and 3 more; report on each alone") as error:
        load_joined([tmp_path / "a", tmp_path / "b"])
    assert str(error.value).count("prediction was") == 3


def test_other_prompts_are_refused_though_no_row_is_there_twice(folders: list[Path]) -> None:
    """Methods are compared on the same prompts; full context of the one folder is not there."""
    file = folders[1] / SAMPLES
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if "fastkv" in line))
    load_joined(folders)
    change(folders[1], 2, prompt_digest="other")
    with pytest.raises(ValueError, match="document 2 of needle at 256 tokens is another"):
        load_joined(folders)


def test_no_folders() -> None:
    with pytest.raises(ValueError, match="at least one folder, got none"):
        load_joined([])
