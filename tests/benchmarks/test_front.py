"""The front study: what is measured, which policies are on the front, and differences by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.front import chat, measure, report
from benchmarks.front.compositions import DROPPERS, SCORERS, SELECTORS, composed, compositions
from benchmarks.front.report import Line, difference, front_of, lines_of
from kvpolicy import registered
from kvpolicy.errors import UnknownPolicyError
from kvpolicy.evaluation.tasks import needle
from kvpolicy.evaluation.tasks.needle import load_model
from kvpolicy.evaluation.tasks.needle.vocabulary import KEY, QUERY
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import FullContext

QUICK = ["--count", "3", "--length", "160", "--batch", "2", "--each", "--rates", "0.2"]


def run(out: Path, *arguments: str) -> dict[str, Any]:
    measure.main([*QUICK, "--out", str(out), *arguments])
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_measures_what_is_answered_held_and_computed(tmp_path: Path) -> None:
    data = run(tmp_path / "f.json", "--names", "full_context", "fastkv", "mass.7/open8/gqa")
    rows = {(row["name"], row["mode"]): row for row in data["rows"]}
    assert len(rows) == len(data["rows"]) == 6
    full = rows["full_context", "with"]
    assert full["scores"] == {"one-hop": 1.0, "two-hop": 1.0}
    assert full["each"] == {"one-hop": "100 100 100", "two-hop": "100 100 100"}
    assert (full["held"], full["work"]) == (1.0, 1.0)
    fast = rows["fastkv", "with"]
    assert fast["held"] == pytest.approx(32 / 160, abs=1e-5)
    assert fast["work"] == pytest.approx((3 + 3 * 32 / 160) / 6, abs=1e-5)
    assert rows["fastkv", "later"]["held"] == pytest.approx(31 / 158, abs=1e-5)
    assert rows["mass.7/open8/gqa", "with"]["work"] < 1


def test_a_misspelt_name_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnknownPolicyError, match="'fastkw' .did you mean fastkv"):
        run(tmp_path / "f.json", "--names", "fastkw")


def test_what_is_there_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "f.json"
    first = run(out, "--names", "full_context", "--modes", "with")
    asked: list[bool] = []

    def counted(*_: Any, later: bool, **__: Any) -> measure.Point:
        asked.append(later)
        return measure.Point([1.0], 1.0, 1.0)

    monkeypatch.setattr(measure, "measure", counted)
    second = run(out, "--names", "full_context")
    assert asked == [True, True]  # two kinds, the question later
    assert second["rows"][: len(first["rows"])] == first["rows"]


def test_work_that_content_decides_is_counted() -> None:
    policy = composed("mass.7", "window8", "gqa").at(0.2)
    assert policy is not None
    model, prompt = load_model(), torch.arange(3, 67)[None]
    cache = PolicyCache(policy)
    with cache.attached(model), torch.no_grad():
        model(prompt, cache=cache)
    reaching, computed = 64, 0
    for layer in range(6):
        computed += reaching
        reaching = cache.propagated[layer].shape[1] if layer in cache.propagated else reaching
    assert measure.work_of(policy, cache, prompt) == pytest.approx(computed / (6 * 64))
    assert measure.work_of(FullContext(), cache, prompt) == 1.0


def test_every_composition_can_be_had_and_none_twice() -> None:
    known = frozenset(registered("policy"))
    found = list(compositions(known))
    names = [each.name for each in found]
    assert len(set(names)) == len(names) > 60
    assert all(each.at(0.05) is not None for each in found)
    used = [set(part) for part in zip(*(n.split("/") for n in names if "/" in n), strict=True)]
    assert used == [set(DROPPERS), set(SCORERS), set(SELECTORS)]


def line(name: str, accuracy: float, held: float, work: float, **each: list[int]) -> Line:
    scores = {("m", 1, kind): found for kind, found in each.items()}
    return Line(name, 0.1, accuracy, held, work, {"m": accuracy}, scores)


def test_the_front_is_what_no_other_beats() -> None:
    best, cheap, small = line("a", 0.9, 0.1, 0.6), line("b", 0.8, 0.1, 0.4), line("c", 0.5, 0.01, 1)
    beaten = [line("d", 0.7, 0.1, 0.6), line("e", 0.9, 0.2, 0.6), line("f", 0.9, 0.1, 0.8)]
    assert front_of([*beaten, best, cheap, small]) == [small, cheap, best]


def test_differences_are_paired_and_kinds_weigh_the_same() -> None:
    ours = line("a", 0, 0, 0, one=[100, 100, 0, 0], two=[50, 100])
    theirs = line("b", 0, 0, 0, one=[0, 100, 0, 0], two=[0, 0], other=[7, 7])
    found = difference(ours, theirs)
    assert found is not None
    mean, half = found
    assert mean == pytest.approx((25 + 75) / 2)
    # Deviations 50 and 35.36 of 4 and 2 pairs.
    assert half == pytest.approx(1.96 * ((50**2 / 4 + 1250 / 2) / 4) ** 0.5)
    assert difference(ours, line("c", 0, 0, 0)) is None


def test_tables_have_every_policy_and_the_picture_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "f.json"
    run(out, "--names", "full_context", "fastkv", "snapkv", "none/open8/gqa", "--modes", "with")
    capsys.readouterr()
    report.main([str(out), "--picture", str(tmp_path / "f.png")])
    said = capsys.readouterr().out
    assert "## needles, question with" in said
    assert "word tasks" not in said
    for name in ("full_context", "fastkv", "snapkv", "none/open8/gqa"):
        assert f"| {name} | 0.2 |" in said
    assert "± " in said
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
    (only,) = {each.rate for each in lines_of([json.loads(out.read_text())], "needle", "with")}
    assert only == 0.2


def test_word_tasks_are_asked_of_their_model(tmp_path: Path) -> None:
    arguments = ["--task", "words", "--kinds", "multi-key", "--names", "full_context"]
    data = run(tmp_path / "f.json", *arguments, "--length", "256", "--modes", "later")
    (row,) = data["rows"]
    assert row["scores"]["multi-key"] == 1.0


def test_two_turns_ask_about_two_pairs(tmp_path: Path) -> None:
    """Full context answers both; what the first question needs does not answer the second."""
    prompt = needle.NeedleTask(256, 1).prompts(1, seed=3)[0]
    document = prompt.input_ids[:-2]
    (asks, key), answer = chat.other_question(document, prompt.input_ids[-1])
    assert asks == QUERY
    assert key != prompt.input_ids[-1]
    place = document.index(key)
    assert document[place - 1] == KEY
    assert document[place + 1 : place + 4] == answer
    assert answer != prompt.answer
    out = tmp_path / "chat.json"
    sizes = ["--length", "256", "--count", "4", "--batch", "2", "--rates", "0.1"]
    chat.main(["--out", str(out), *sizes, "--names", "full_context", "snapkv"])
    rows = {row["name"]: row["scores"] for row in json.loads(out.read_text())["rows"]}
    assert rows["full_context"] == [100, 100]
    assert rows["snapkv"][0] > rows["snapkv"][1]
