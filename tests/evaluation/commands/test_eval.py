"""`kvpolicy eval` and `kvpolicy report`: from a command line to a page, and what goes wrong."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.evaluation import models
from kvpolicy.evaluation.suite import Settings, Summary, load, run
from kvpolicy.evaluation.suite.harness import HarnessRunner
from kvpolicy.evaluation.suite.sample import Answer, Cell, Document
from tests.evaluation.suite.tasks import TASKS
from tests.evaluation.suite.test_report import cells_of
from tests.evaluation.support import Run

ASKED = ("--tasks", "needle_one_hop", "--lengths", "128,192", "-p", "snapkv", "--limit", 2)


def fails(result: tuple[int, str, str], *said: str, status: int = 1) -> None:
    """One clear line on stderr, before anything was asked."""
    assert result[0] == status
    lines = [line for line in result[2].splitlines() if line.strip()]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    for each in said:
        assert each in lines[0]


def test_answers_can_be_bounded(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "results"
    bound = ("--decoding-tokens", 24, "--decoding-every", 1)
    status, _, err = run("eval", *ASKED, "--rate", 0.5, *bound, "--out", out)
    assert (status, err) == (0, "")
    methods = load(out).description.methods
    policies = {label: each.parameters for label, each in methods.items()}
    assert "DecodingEviction" in policies["snapkv 0.5"], policies
    assert "DecodingEviction" not in policies["full_context"]
    fails(run("eval", *ASKED, "--decoding-every", 1, "--out", out), "--decoding-tokens must")


def test_a_bound_below_the_facts_breaks_answers_off(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "results"
    asked = ("--model", "needle", "--tasks", "needle_one_hop", "--lengths", 64)
    bound = ("-p", "streamingllm", "--rate", 1.0, "--decoding-tokens", 8, "--decoding-every", 1)
    status, said, err = run("eval", *asked, *bound, "--limit", 1, "--out", out)
    assert (status, err) == (0, "")
    assert "needle_one_hop 64, question with, full_context: exact_match 1.000" in said
    (full,), (small,) = (
        [each.answer.scores for each in load(out).samples if each.cell.method == method]
        for method in ("full_context", "streamingllm 1")
    )
    assert full == {"exact_match": 1.0}
    assert small == {"exact_match": 0.0}


def test_from_a_command_line_to_a_page(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "results"
    arguments = ("eval", *ASKED, "--rate", 0.1, "--rate", 0.5, "--question", "with,later")
    status, said, err = run(*arguments, "--out", out, "--threads", 1)
    assert (status, err) == (0, "")
    lines = said.splitlines()
    assert "needle_one_hop 128, question with, snapkv 0.1 ..." in lines
    scored = [line for line in lines if "exact_match" in line]
    assert len(scored) == 2 * 2 * 3
    assert scored[0].startswith(
        "needle_one_hop 128, question with, full_context: exact_match 1.000"
    )
    assert lines[-1] == f"written to {out}; for a page of it: kvpolicy report {out}"
    results = load(out)
    assert len(results.samples) == 2 * 2 * 3 * 2
    settings = json.loads((out / "settings.json").read_text())
    assert settings["settings"]["model"] == "needle"
    assert settings["settings"]["threads"] == 1
    assert len(settings["settings"]["fingerprint"]) == 16
    assert {"kvpolicy", "torch", "transformers", "python", "lm_eval"} == set(settings["versions"])

    before = (out / "samples.jsonl").read_bytes()
    status, said, err = run(*arguments, "--out", out)  # with the folder's own threads
    assert (status, err) == (0, "")
    assert (out / "samples.jsonl").read_bytes() == before
    assert said.count("each, 2 of them finished before") == 12

    status, said, err = run("report", out)
    assert (status, err) == (0, "")
    assert said == f"written: {out / 'report.html'}, {out / 'report.md'}\n"
    figures = Summary.of(results).figures
    rows = cells_of(out / "report.md")[2:]
    for row, (cell, figure) in zip(rows, figures.items(), strict=True):
        cells = [each.strip() for each in row.split("|")[1:-1]]
        assert cells[:5] == [
            cell.task,
            str(cell.length),
            cell.question,
            cell.method,
            f"{figure.score:.1f}",
        ]


def test_goes_on_after_it_was_stopped(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Cell, int]] = []
    answer = HarnessRunner.answer

    def stopping(self: Any, cell: Cell, documents: Sequence[Document]) -> list[Answer]:
        if len(asked) == 3:
            raise KeyboardInterrupt
        asked.extend((cell, document.id) for document in documents)
        return answer(self, cell, documents)

    with monkeypatch.context() as patch:
        patch.setattr(HarnessRunner, "answer", stopping)
        status, said, err = run("eval", *ASKED, "--out", tmp_path, "--threads", 1)
    assert (status, err) == (130, "error: interrupted\n")
    assert f"finished answers stay in {tmp_path}; run the same command again" in said
    assert len(load(tmp_path).samples) == 3
    status, said, _ = run("report", tmp_path, "--out-file", tmp_path / "half.html")
    assert (status, said.splitlines()[0]) == (0, "3 of 8 samples are finished")
    assert "Not finished: 3 of 4 cells" in (tmp_path / "half.html").read_text()
    status, said, err = run("eval", *ASKED, "--out", tmp_path)
    assert (status, err) == (0, "")
    assert "needle_one_hop 128, question with, full_context: " in said
    samples = load(tmp_path).samples
    assert len({(each.cell, each.document) for each in samples}) == len(samples) == 8
    assert [(each.cell, each.document) for each in samples[:3]] == asked


def test_a_folder_of_other_settings(run: Run, tmp_path: Path) -> None:
    assert run("eval", *ASKED, "--out", tmp_path, "--threads", 1)[0] == 0
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir() if each.is_file()}
    other = ("--batch-size", 2, "--threads", 2, "--set", "window_size=4", "-p", "fastkv")
    fails(
        run("eval", *ASKED, *other, "--out", tmp_path),
        "out must be a new folder, or one of the same settings",
        "batch_size was 1, got 2",
        "threads was 1, got 2",
        "method snapkv 0.1 was SnapKV",
    )
    assert before == {each.name: each.read_bytes() for each in tmp_path.iterdir() if each.is_file()}


def evaluated(run: Run, out: Path, asked: dict[str, object]) -> list[dict[str, Any]]:
    """The samples that the command writes, without their times."""
    arguments = [each for pair in asked.items() for each in pair]
    status, _, err = run("eval", *arguments, "--threads", 1, "--out", out)
    assert (status, err) == (0, "")
    rows = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    return [{key: it for key, it in row.items() if "seconds" not in key} for row in rows]


FIRST: dict[str, object] = {
    "--tasks": "needle_one_hop",
    "--lengths": "128",
    "-p": "snapkv",
    "--limit": 1,
}


@pytest.mark.parametrize(
    ("option", "more", "both"),
    [
        ("-p", "fastkv", "snapkv,fastkv"),
        ("--tasks", "needle_two_hop", "needle_one_hop,needle_two_hop"),
        ("--lengths", "192", "128,192"),
        ("--limit", 2, 2),
    ],
)
def test_a_folder_is_extended(
    run: Run, tmp_path: Path, option: str, more: object, both: object
) -> None:
    first = evaluated(run, tmp_path / "out", FIRST)
    before = (tmp_path / "out" / "samples.jsonl").read_bytes()
    found = evaluated(run, tmp_path / "out", FIRST | {option: more})
    assert (tmp_path / "out" / "samples.jsonl").read_bytes().startswith(before)
    assert len(first) < len(found)
    once = evaluated(run, tmp_path / "once", FIRST | {option: both})
    assert sorted(found, key=str) == sorted(once, key=str)
    settings = [json.loads((tmp_path / it / "settings.json").read_text()) for it in ("out", "once")]
    assert settings[0] == settings[1]


def test_a_report_of_two_folders(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for policy, name in (("snapkv", "a"), ("fastkv", "b")):
        evaluated(run, Path(name), FIRST | {"-p": policy})
    settings = Path("b/settings.json")
    written = json.loads(settings.read_text())
    written["versions"]["torch"] = "1.0"
    settings.write_text(json.dumps(written))
    status, said, err = run("report", "a", "b")
    assert (status, err) == (0, "")
    differs, files = said.splitlines()
    assert re.fullmatch(r"differs: version of torch: .* in a, 1\.0 in b", differs)
    assert files == "written: report.html, report.md"
    table = Path("report.md").read_text()
    assert table.startswith("| folder | a | b |\n")
    for method in ("full_context", "snapkv 0.1", "fastkv 0.1"):
        assert table.count(f"| {method} |") == 1
    file = Path("b/samples.jsonl")
    first, rest = file.read_text().split("\n", 1)
    wrong = json.dumps(json.loads(first) | {"prediction": "other"})
    file.write_text(f"{wrong}\n{rest}")
    fails(run("report", "a", "b"), "must not contradict each other, got a and b", "'other'")


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_none(*arguments: object, **named: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(models, "load", load_none)
    monkeypatch.setattr("kvpolicy.evaluation.commands.terminal.load", load_none)


@pytest.mark.usefixtures("no_model")
def test_unknown_tasks_are_refused_before_any_progress(run: Run, tmp_path: Path) -> None:
    tasks = "needle_one_hops,needle_one_hop,two_hip"
    status, out, err = run("eval", "--tasks", tasks, "--out", tmp_path / "out")
    assert (status, out) == (1, "")
    assert re.search("got 'needle_one_hops'; near: needle_one_hop.*; and 'two_hip'; near: ", err)


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--tasks", "needle_one_hops"), "near: needle_one_hop"),
        (("--tasks", "needle_one_hop", "--chat"), "tokenizer with a chat template, got"),
        (("--tasks", "needle_one_hop", "--lengths", "4k"), "--lengths must be numbers of tokens"),
        (("--tasks", "needle_one_hop", "--question", "never"), "must be with or later, got never"),
        (("--tasks", "needle_one_hop", "-p", "snapvk"), "snapkv"),
        (("--tasks", "needle_one_hop", "--data", "nowhere"), "data must be a folder, got nowhere"),
        (("--tasks", "needle_one_hop", "--model", "no/such/model"), "does not exist"),
    ],
)
def test_bad_input_is_said_before_a_model_is_loaded(
    run: Run, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    fails(run("eval", *arguments, "--out", tmp_path / "results"), said)
    assert not (tmp_path / "results").exists()


def test_prompts_longer_than_the_model(run: Run, tmp_path: Path) -> None:
    arguments = (
        "--tasks",
        "needle_one_hop",
        "--lengths",
        "128,4224",
        "--out",
        tmp_path / "results",
    )
    fails(run("eval", *arguments), "4,224 positions of needle", "give smaller --lengths")
    assert not (tmp_path / "results").exists()


def test_without_the_harness(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    result = run("eval", "--tasks", "needle_one_hop", "--out", tmp_path)
    fails(result, "lm_eval is not installed; get it with: pip install 'kvpolicy[eval]'")


def test_report_of_no_folder(run: Run, tmp_path: Path) -> None:
    fails(run("report", tmp_path), "a folder that kvpolicy eval has written")


def test_from_python(tmp_path: Path) -> None:
    settings = Settings(
        "needle", tasks=("needle_choice",), lengths=(128,), include=(TASKS,), limit=2, threads=1
    )
    results = run(settings, tmp_path, policies=["snapkv", "full_context"], rates=[0.1])
    assert results == load(tmp_path)
    figures = Summary.of(results).figures
    assert [str(cell) for cell in figures] == [
        "needle_choice 128, question with, full_context",
        "needle_choice 128, question with, snapkv 0.1",
    ]
    assert all(figure.finished for figure in figures.values())
