"""docs/first_hour.md runs as printed, from top to bottom, with the model that it makes."""

import contextlib
import io
import json
import re
import shlex
from pathlib import Path

import pytest

from kvpolicy.evaluation.cli import main

PAGE = (Path(__file__).parents[1] / "docs/first_hour.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HUB = "Qwen/Qwen2.5-0.5B-Instruct"  # its commands are run by test_commands_in_pages.py
# What the page says to write without a network.
OFFLINE = {
    'NAME = "Qwen/Qwen2.5-0.5B-Instruct"': 'NAME = "my-model"',
    'QUESTION = "Who wrote this report?"': 'QUESTION = "QUERY s60"',
}
# What each block prints, in words of the page; a scorer's contract prints nothing.
PRINTED = [
    ["QUERY s60 -> s79 s45 s34"],
    ["s79 s45 s34", "10.2% of the keys and values are held"],
    ["s79 s45 s34", "10.2% of the keys and values were held"],
    [],
    ["s79 s45 s34"],
]


@pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")
def test_the_first_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = [code for language, code in FENCE.findall(PAGE) if language == "python"]
    assert len(blocks) == len(PRINTED)
    names: dict[str, object] = {}
    for code, lines in zip(blocks, PRINTED, strict=True):
        for written, offline in OFFLINE.items():
            assert written in PAGE
            code = code.replace(written, offline)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        assert printed.getvalue().splitlines() == lines
        assert all(line in PAGE for line in lines[:1])

    commands = [
        shlex.split(line)[1:]
        for language, code in FENCE.findall(PAGE)
        for line in code.splitlines()
        if not language and line.startswith("kvpolicy ")
    ]
    named = [command for command in commands if HUB in command]
    assert [command[0] for command in named] == ["compare", "export"]
    own = [command for command in commands if HUB not in command]
    assert [command[0] for command in own] == ["compare", "export", "serve-check", "generate"]
    for command in own:
        assert main([*command, "--rounds", "1"] if command[0] == "compare" else command) == 0
    right = {row["policy"]: rate_of(row) for row in rows_of(tmp_path / "compared/compare.json")}
    assert right["full_context"] == right["snapkv"] == right["fastkv"] == 1.0
    assert right["streamingllm"] <= 0.25
    assert (tmp_path / "my-documents/report.safetensors").is_file()
    printed = capsys.readouterr().out
    assert re.search(r"^ *report +1,022 +204 ", printed, re.MULTILINE)
    assert printed.rstrip().endswith("s79 s45 s34")


def rows_of(file: Path) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = json.loads(file.read_text())["rows"]
    return rows


def rate_of(row: dict[str, object]) -> float:
    (score,) = row["exact_match"].values()  # type: ignore[attr-defined]
    return float(score["rate"])
