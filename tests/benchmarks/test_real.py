"""`make real`, on a random model: it goes on where it ended, and sums are those of its answers."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import natural_questions, real
from kvpolicy.evaluation import Loaded
from kvpolicy.policies import ReplayKV
from tests.evaluation.support import tiny_llama
from tests.evaluation.tokenizers import CHAT, tiny_tokenizer

ASKED = ("--models", "smollm2", "--rates", "0.2", "--count", "2", "--policies", "snapkv")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = Loaded("tiny", tiny_llama(), tiny_tokenizer(chat=CHAT, special=True))
    monkeypatch.setattr(real, "model_of", lambda name: loaded)
    monkeypatch.setattr(real, "MODELS", {"smollm2": (300,), "gemma": (300,)})
    monkeypatch.setattr(real, "ROUNDS", 1)


def run(folder: Path, *more: str) -> dict[str, Any]:
    out = folder / "real.json"
    assert real.main([*ASKED, *more, "--work", str(folder / "work"), "--out", str(out)]) == 0
    found: dict[str, Any] = json.loads(out.read_text())["cells"]
    return found


def test_a_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After a line was cut off, and with a policy more, only what is missing is measured."""
    first = run(tmp_path, "--tasks", "needles")
    assert set(first) == {"smollm2 needles 300 known", "smollm2 needles 300 later"}
    assert capsys.readouterr().out.count(": prompt ") == 4
    file = tmp_path / "work/smollm2-needles-300-known.jsonl"
    lines = [line for line in file.read_text().splitlines() if line]
    assert [json.loads(line)["index"] for line in lines] == [0, 1]
    file.write_text(f"\n{lines[0]}\n\n{lines[1][:90]}")
    assert run(tmp_path, "--tasks", "needles") == first
    assert capsys.readouterr().out.count(": prompt ") == 1
    more = run(tmp_path, "--tasks", "needles", "--policies", "snapkv", "streamingllm")
    assert capsys.readouterr().out.count(": prompt ") == 4
    known = more["smollm2 needles 300 known"]["rows"]
    everything = [row for row in known if row["kind"] == "all"]
    assert [row["policy"] for row in everything] == [
        *("full context", "snapkv 0.2", "streamingllm 0.2")
    ]
    assert everything[:2] == [
        row for row in first["smollm2 needles 300 known"]["rows"] if row["kind"] == "all"
    ]


def test_sums_are_those_of_the_answers(tmp_path: Path) -> None:
    found = run(tmp_path, "--tasks", "lines", "continuation")
    assert set(found) == {
        f"smollm2 {name}"
        for name in ("lines 300 known", "lines 300 later", "continuation 300 known")
    }
    cell = found["smollm2 lines 300 later"]
    assert (cell["prompts"], cell["later"], cell["tokens"]) == (2, True, 300)
    there = real.done(tmp_path / "work/smollm2-lines-300-later.jsonl")
    own = [there[index]["snapkv 0.2"] for index in (0, 1)]
    full = [there[index]["full context"] for index in (0, 1)]
    (row,) = (each for each in cell["rows"] if each["policy"] == "snapkv 0.2")
    per_token = [each.log_prob / each.answer_len for each in own]
    assert row["log_prob"] == pytest.approx(sum(per_token) / 2, abs=1e-4)
    assert row["divergence"] == pytest.approx(sum(each.divergence for each in own) / 2, abs=1e-4)
    lost = [
        each - base.log_prob / base.answer_len for each, base in zip(per_token, full, strict=True)
    ]
    assert row["difference"]["log_prob"] == pytest.approx(sum(lost) / 2, abs=1e-4)
    assert own[0].log_prob != own[1].log_prob


def test_a_method_is_measured_again_and_other_rows_stay(tmp_path: Path) -> None:
    first = run(tmp_path, "--tasks", "needles", "lines", "--policies", "snapkv", "streamingllm")
    (tmp_path / "work").rename(tmp_path / "lost")
    again = run(tmp_path, "--tasks", "needles", "--count", "1", "--keep")
    assert set(again) == set(first)
    assert again["smollm2 lines 300 later"] == first["smollm2 lines 300 later"]
    cells = [each["smollm2 needles 300 later"] for each in (first, again)]
    before, after = ({(row["kind"], row["policy"]): row for row in cell["rows"]} for cell in cells)
    assert set(after) == set(before)
    assert after["all", "streamingllm 0.2"] == before["all", "streamingllm 0.2"]
    assert (before["all", "snapkv 0.2"]["count"], after["all", "snapkv 0.2"]["count"]) == (2, 1)
    assert cells[1]["prompts"] == 2


def test_the_time_is_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--tasks", "needles", "--minutes", "0") == {}
    assert "the time is up; the same command continues" in capsys.readouterr().out


def test_times_are_of_full_context(tmp_path: Path) -> None:
    run(tmp_path, "--tasks", "needles")
    found = run(tmp_path, "--tasks", "needles", "--times")["smollm2 needles 300 known"]
    assert set(found["times"]) == {"full context", "snapkv"}
    assert found["times"]["full context"] == {"prefill_cpu": 1.0, "decode_cpu": 1.0}
    assert found["full_prefill_cpu_seconds"] >= 0
    assert found["times"]["snapkv"]["prefill_cpu"] > 0


def test_cells_in_turns(tmp_path: Path) -> None:
    todo = real.cells(["smollm2", "gemma"], ["needles", "continuation"], most=2)
    assert [each.name for each in todo] == [
        f"{model} {rest}"
        for model in ("smollm2", "gemma")
        for rest in ("needles 300 known", "needles 300 later", "continuation 300 known")
    ]
    order = [(cell.name, index) for cell, index, _ in real.missing(todo, ["a"], tmp_path)]
    assert order == [(cell.name, index) for index in (0, 1) for cell in todo]
    assert {each.count for each in real.cells(["gemma"], ["needles", "lines"])} == {64, 32}


def test_all_methods_at_four_budgets() -> None:
    found = real.chosen()
    assert not any(each.name == "full_context" for each in found)
    rates = [each.retention_rate for each in found if each.name == "snapkv"]
    assert rates == [0.05, 0.1, 0.2, 0.4]
    (dropping,) = real.chosen(["replaykv_dropping"], [0.5])
    assert (dropping.label, str(dropping.policy)) == (
        "replaykv_dropping 0.5",
        str(ReplayKV(0.5, tsp_rate=0.5)),
    )
    assert all(sum(each.name == name for each in found) == 4 for name in real.VARIANTS)


def test_natural_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The right passage is among others, at a depth that differs from prompt to prompt."""
    made = [
        {
            "question": f"who was {number}",
            "answers": [f"Person {number}"],
            "ctxs": [{"title": f"T{number}", "text": f"Person {number} was there."}],
        }
        for number in range(40)
    ]
    path = tmp_path / "nq.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write("\n".join(map(json.dumps, made)))
    natural_questions.rows.cache_clear()
    with pytest.raises(ValueError, match="NATURAL_QUESTIONS must be the path"):
        real.task_of("natural_questions").questions(tiny_tokenizer(), 200, 1)
    monkeypatch.setenv("NATURAL_QUESTIONS", str(path))
    asked = real.task_of("natural_questions").questions(tiny_tokenizer(), 300, 3)
    depths = set()
    for each in asked:
        question = each.question
        passages = question.document.split("\n\n")
        (number,) = question.question.removeprefix("Who was ").removesuffix("?").split()
        place = passages.index(f"T{number}: Person {number} was there.")
        depths.add(round(place / len(passages), 1))
        assert question.answers == (f"Person {number}",)
        assert len(set(passages)) == len(passages) > 3
    assert len(depths) == 3
    natural_questions.rows.cache_clear()
