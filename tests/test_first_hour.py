"""docs/first_hour.md runs as printed, from top to bottom, with the real model that it names."""

import json
import re
import shlex
from pathlib import Path

import pytest

from kvpolicy.evaluation.cli import main
from kvpolicy.evaluation.default_model import default_model
from tests.pages import FENCE, printed, text_of

PAGE = text_of("docs/first_hour.md")
HUB = "Qwen/Qwen2.5-0.5B-Instruct"  # its commands are run by test_commands_in_pages.py
RIGHT = "The special magic number of Paris is 4322492."
# What each block prints; a scorer's contract prints nothing.
PRINTED = [
    [],
    [],
    [
        f"FullContext, 100% held: {RIGHT}",
        f"ReplayKV, 22% held: {RIGHT}",
        "SnapKV, 22% held: The special magic number of Paris is 4321. This is a",
    ],
    [],
    ["The special number of Paris is 4322492. It"],
]


@pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")
def test_the_first_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        default_model()
    except ValueError as error:
        pytest.skip(str(error))
    monkeypatch.chdir(tmp_path)
    blocks = [code for language, code in FENCE.findall(PAGE) if language == "python"]
    assert len(blocks) == len(PRINTED)
    assert all(len(re.findall(r"^.+$", code, re.MULTILINE)) <= 10 for code in blocks)
    names: dict[str, object] = {}
    for code, lines in zip(blocks, PRINTED, strict=True):
        assert printed(code, names).splitlines() == lines
        assert all(line in PAGE for line in lines if "held: " in line)

    commands = [
        shlex.split(line)[1:]
        for language, code in FENCE.findall(PAGE)
        for line in code.splitlines()
        if not language and line.startswith("kvpolicy ")
    ]
    named = [command for command in commands if HUB in command]
    assert [command[0] for command in named] == ["compare", "export", "serve-check"]
    own = [command for command in commands if HUB not in command]
    assert [command[0] for command in own] == ["compare", "generate"]
    for command in own:
        small = ["--count", "2", "--rounds", "0"] if command[0] == "compare" else []
        assert main([*command, *small]) == 0
    found = json.loads((tmp_path / "compared/compare.json").read_text())
    assert [row["policy"] for row in found["rows"]] == [
        *("full_context", "replaykv", "snapkv", "streamingllm")
    ]
    assert capsys.readouterr().out.rstrip().endswith(RIGHT)
