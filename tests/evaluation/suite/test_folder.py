"""A folder of results: what is finished is neither lost nor asked again nor mixed with others."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import attrs
import pytest

from kvpolicy.evaluation.suite import Sample, load
from kvpolicy.evaluation.suite.description import Description
from kvpolicy.evaluation.suite.filling import expected_samples, fill
from kvpolicy.evaluation.suite.folder import LOCK, SAMPLES, SETTINGS, opened
from tests.evaluation.suite.stand_in import QUESTIONS, StandIn, described, filled, made_up

# Lengths 256 and 512 and a task without, 2 questions, 5 methods, 6 documents each.
ALL = 3 * 2 * 5 * 6


def test_every_combination_once_and_full_context_at_no_rate(tmp_path: Path) -> None:
    results = filled(tmp_path)
    asked = [(sample.cell, sample.document) for sample in results.samples]
    assert len(asked) == len(set(asked)) == ALL
    assert {cell.method for cell, _ in asked} == {
        "full_context",
        "snapkv 0.1",
        "snapkv 0.5",
        "fastkv 0.1",
        "fastkv 0.5",
    }
    first = [str(cell) for cell in results.description.expected][:6]
    assert first[0] == "needle 256, question with, full_context"
    assert first[5] == "needle 256, question later, full_context"


def test_a_line_has_all_there_is_to_know(tmp_path: Path) -> None:
    filled(tmp_path)
    lines = (tmp_path / SAMPLES).read_text(encoding="utf-8").splitlines()
    line = next(json.loads(each) for each in lines if '"snapkv 0.5"' in each)
    documents = StandIn().documents()["needle", 256]
    assert line == {
        "task": "needle",
        "length": 256,
        "question": "with",
        "method": "snapkv 0.5",
        "policy": "snapkv",
        "rate": 0.5,
        "document": 0,
        "prompt_digest": documents[0].digest,
        "references": ["yes", "ja"],
        "depth": 0.0,
        "prediction": "yes\n",
        "scores": {"match": 1.0, "other": 0.25},
        "tokens_seen": 256,
        "tokens_kept": 128.0,
        "bytes_held": 128 * 512,
        "prefill_seconds": 0.256,
        "total_seconds": 0.512,
    }
    beside = json.loads((tmp_path / SETTINGS).read_text())
    assert beside["versions"] == {"kvpolicy": "1"}
    assert beside["machine"] == {"processor": "made up", "cpus": 2}
    assert "SnapKV" in beside["methods"]["snapkv 0.5"]["parameters"] or "CachePolicy" in str(
        beside["methods"]["snapkv 0.5"]["parameters"]
    )


def test_lines_and_settings_come_back_as_they_were(tmp_path: Path) -> None:
    results = filled(tmp_path)
    for sample in results.samples:
        assert Sample.from_line(sample.to_line()) == sample
    assert Description.from_json(results.description.to_json()) == results.description
    runner = StandIn()
    for cell, samples in results.by_cell().items():
        documents = runner.documents()[cell.task, cell.length]
        assert [each.answer for each in samples] == [made_up(cell, each) for each in documents]


@pytest.mark.parametrize("stop", [0, 1, 7, 61, ALL - 1])
def test_goes_on_without_asking_again(tmp_path: Path, stop: int) -> None:
    stopped = StandIn(stop_after=stop)
    with pytest.raises(KeyboardInterrupt):
        filled(tmp_path / "stopped", stopped)
    kept = (tmp_path / "stopped" / SAMPLES).read_bytes() if stop > 1 else b""
    finished = {(each.cell, each.document) for each in load(tmp_path / "stopped").samples}
    assert len(finished) == stop - stop % 2  # of the batch of two that was being asked, none
    again = StandIn()
    filled(tmp_path / "stopped", again)
    assert not finished & set(again.asked)
    assert len(finished) + len(again.asked) == ALL
    filled(tmp_path / "whole")
    content = (tmp_path / "stopped" / SAMPLES).read_bytes()
    assert content == (tmp_path / "whole" / SAMPLES).read_bytes()
    assert content.startswith(kept)
    idle = StandIn()
    filled(tmp_path / "stopped", idle)
    assert idle.asked == []


def test_a_torn_last_line_is_cut_off_and_asked_again(tmp_path: Path) -> None:
    filled(tmp_path)
    file = tmp_path / SAMPLES
    whole = file.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    settings = (tmp_path / SETTINGS).stat().st_mtime_ns
    for end in (last + 1, (last + len(whole)) // 2, len(whole) - 2, len(whole) - 1):
        file.write_bytes(whole[:end])
        assert len(load(tmp_path).samples) == ALL - 1
        assert file.read_bytes() == whole[:end]  # who only reads changes nothing
        runner = StandIn()
        filled(tmp_path, runner)
        assert len(runner.asked) == 1
        assert file.read_bytes() == whole
    assert (tmp_path / SETTINGS).stat().st_mtime_ns == settings


def test_a_character_torn_in_its_bytes(tmp_path: Path) -> None:
    filled(tmp_path)
    file = tmp_path / SAMPLES
    content = file.read_bytes()
    inside = content.rindex("\u00f6".encode()) + 1
    file.write_bytes(content[:inside])
    filled(tmp_path)
    assert sorted(file.read_bytes().splitlines()) == sorted(content.splitlines())


def test_a_killed_process_loses_what_it_was_asking(tmp_path: Path) -> None:
    """Not one that tidies up: a process that is gone from one moment to the next."""
    code = (
        "import sys, time; from pathlib import Path\n"
        "from tests.evaluation.suite import stand_in\n"
        "answer = stand_in.StandIn.answer\n"
        "def slow(self, cell, documents):\n"
        "    time.sleep(0.02)\n"
        "    return answer(self, cell, documents)\n"
        "stand_in.StandIn.answer = slow\n"
        "stand_in.filled(Path(sys.argv[1]))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], cwd=Path(__file__).parents[3]
    )
    file = tmp_path / SAMPLES
    deadline = time.monotonic() + 120
    while not file.exists() or file.read_bytes().count(b"\n") < 10:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    finished = len(load(tmp_path).samples)
    assert 10 <= finished < ALL
    runner = StandIn()
    assert len(filled(tmp_path, runner).samples) == ALL
    assert len(runner.asked) == ALL - finished


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "other"}, "model was stand-in, got other"),
        ({"chat_template": True}, "chat_template was not given, got True"),
    ],
)
def test_other_settings_are_refused_by_name(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    filled(tmp_path)
    before = (tmp_path / SAMPLES).read_bytes()
    with pytest.raises(ValueError, match=said):
        filled(tmp_path, **change)
    assert (tmp_path / SAMPLES).read_bytes() == before


def test_other_versions_and_machines_are_refused(tmp_path: Path) -> None:
    filled(tmp_path)
    same = described(StandIn())
    assert same.differences(described(StandIn(), rates=(0.1, 0.2))) == []  # test_extending.py
    newer = attrs.evolve(same, environment=same.environment | {"versions": {"kvpolicy": "2"}})
    with (
        pytest.raises(ValueError, match="version of kvpolicy was 1, got 2"),
        opened(tmp_path, newer),
    ):
        pass
    more = attrs.evolve(same, environment=same.environment | {"machine": {"processor": "made up"}})
    assert same.differences(more) == []  # how many processors there are counts for nothing


def test_other_prompts_are_refused(tmp_path: Path) -> None:
    filled(tmp_path)
    with pytest.raises(ValueError, match="document 0 of needle was another"):
        filled(tmp_path, StandIn(word="other"))


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    with (
        opened(tmp_path, described(StandIn())),
        pytest.raises(ValueError, match="no other process writes"),
    ):
        filled(tmp_path)
    assert len(filled(tmp_path).samples) == ALL
    assert {each.name for each in tmp_path.iterdir()} <= {SAMPLES, SETTINGS, LOCK}


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        (SETTINGS, None, "which has no settings.json"),
        (SETTINGS, "{}", "not the settings of an evaluation"),
        (SETTINGS, '{"format": 99}', "format must be 1"),
        (SAMPLES, "{}\n", "samples.jsonl, line 1: not a sample"),
        (SAMPLES, "nothing\n", "samples.jsonl, line 1: not a sample"),
    ],
)
def test_what_is_no_folder_of_results(
    tmp_path: Path, file: str, content: str | None, said: str
) -> None:
    filled(tmp_path)
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match=said):
        load(tmp_path)


def test_lines_twice_and_lines_of_no_cell(tmp_path: Path) -> None:
    filled(tmp_path)
    file = tmp_path / SAMPLES
    content = file.read_text()
    file.write_text(content + content.splitlines()[0] + "\n")
    with pytest.raises(ValueError, match="document 0 is there twice"):
        load(tmp_path)
    file.write_text(content.replace('"task": "reading"', '"task": "writing"', 1))
    with pytest.raises(ValueError, match="no cell writing, question with, full_context"):
        load(tmp_path)


def test_listener_and_progress_hear_of_cells(tmp_path: Path) -> None:
    from kvpolicy.evaluation.suite import Answer, Cell, Listener

    class Told(Listener):
        heard: list[tuple[str, int, int]] = []  # noqa: RUF012

        def finished(self, cell: Cell, answers: "list[Answer]", found: int) -> None:  # type: ignore[override]
            self.heard.append((str(cell), len(answers), found))

    with pytest.raises(KeyboardInterrupt):
        filled(tmp_path, StandIn(stop_after=8))
    told: list[tuple[str, int, int]] = []
    runner = StandIn()
    with opened(tmp_path, described(runner)) as folder:
        fill(
            folder,
            runner,
            runner.documents(),
            batch_size=4,
            progress=lambda stage, done, total: told.append((stage, done, total)),
            listener=Told(),
        )
    assert Told.heard[:2] == [
        ("needle 256, question with, full_context", 6, 6),
        ("needle 256, question with, snapkv 0.1", 6, 2),
    ]
    assert told[0] == ("needle 256, question with, snapkv 0.1", 8, ALL)
    assert told[-1] == ("done", ALL, ALL)


def test_expected_samples_by_hand() -> None:
    documents = StandIn((64,), count=2).documents()
    cells = expected_samples(documents, QUESTIONS, ["full_context", "snapkv 0.1"])
    assert [(cell.task, cell.question, cell.method) for cell in cells] == [
        ("needle", "with", "full_context"),
        ("needle", "with", "snapkv 0.1"),
        ("needle", "later", "full_context"),
        ("needle", "later", "snapkv 0.1"),
        ("reading", "with", "full_context"),
        ("reading", "with", "snapkv 0.1"),
        ("reading", "later", "full_context"),
        ("reading", "later", "snapkv 0.1"),
    ]
    assert set(cells.values()) == {2}
