"""`kvpolicy eval` on small tasks of our own: what it answers, keeps, continues and refuses."""

import csv
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvpolicy.evaluation.suite import answering
from kvpolicy.evaluation.suite.folder import load_cells
from kvpolicy.evaluation.suite.tasks import How, find_tasks, make_prompts
from kvpolicy.integrations.lm_eval import PolicyLM
from tests.evaluation.support import Run, fails, works

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "tests" / "needle" / "weights"
TASKS = Path(__file__).parent / "tasks"
ASKED: dict[str, object] = {
    "--model": MODEL,
    "--include": TASKS,
    "--tasks": "own_words",
    "--lengths": "96",
    "-p": "snapkv",
    "--rate": 0.2,
    "--limit": 2,
    "--threads": 1,
}


def arguments(out: Path, **other: object) -> list[object]:
    """The command line, with options in place of the usual ones; None leaves one out."""
    changed = ASKED | {f"--{name}".replace("--p", "-p"): value for name, value in other.items()}
    pairs = [pair for pair in changed.items() if pair[1] is not None]
    return ["eval", *(each for pair in pairs for each in pair), "--out", out]


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "table.csv").open() as file:
        return list(csv.DictReader(file))


def files(out: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in (out / "cells").iterdir()}


def answers(out: Path) -> dict[str, Any]:
    """All cells without their times."""
    found = {name: json.loads(content) for name, content in files(out).items()}
    for cell in found.values():
        for sample in cell["samples"]:
            del sample["prefill_seconds"], sample["total_seconds"]
    return found


def test_scores_are_the_harness_s_own(run: Run, tmp_path: Path) -> None:
    asked = arguments(tmp_path, tasks="own", lengths="96,160", p="snapkv,fastkv", limit=5)
    said = works(run(*asked, "--batch-size", 2))
    found = {(row["task"], row["length"], row["policy"]): row for row in rows(tmp_path)}
    assert [*found] == [
        (task, length, policy)
        for task, length in (("own_choice", ""), ("own_words", "96"), ("own_words", "160"))
        for policy in ("full_context", "fastkv 0.2", "snapkv 0.2")
    ]
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    scores = []
    for task, length, metric in (
        ("own_choice", "", "acc"),
        ("own_words", "96", "exact_match"),
        ("own_words", "160", "exact_match"),
    ):
        metadata = {"max_seq_lengths": [int(length or 96)], "tokenizer": str(MODEL)}
        manager = TaskManager(include_path=TASKS, include_defaults=False, metadata=metadata)  # type: ignore[arg-type]
        for policy in ("full_context", "snapkv", "fastkv"):
            kept = {} if policy == "full_context" else {"retention_rate": 0.2}
            lm = PolicyLM(model, tokenizer=tokenizer, policy=policy, **kept)
            limited = {"limit": 5, "bootstrap_iters": 0, "task_manager": manager}
            own = simple_evaluate(model=lm, tasks=[task], **limited)["results"][task]
            row = found[task, length, policy if not kept else f"{policy} 0.2"]
            assert row["metric"] == metric
            assert float(row["score"]) == pytest.approx(100 * own[f"{metric},none"])
            scores.append(float(row["score"]))
    assert len(set(scores)) > 1
    assert max(map(len, said.splitlines()[:-1])) <= 80
    assert "own_words, 160 tokens: exact_match" in said
    assert said.splitlines()[-1] == f"written to {tmp_path}: table.md, table.csv, picture.png"


def test_costs_and_pictures(run: Run, tmp_path: Path) -> None:
    asked = arguments(tmp_path, lengths="160", p="snapkv,streamingllm", rate="0.5", limit=3)
    assert run(*asked, "--decoding-tokens", 40)[0] == 0
    full, small, last = rows(tmp_path)
    assert [full["policy"], small["policy"]] == ["full_context", "snapkv 0.5"]
    assert float(full["tokens_seen"]) == float(full["tokens_kept"]) == 160
    assert float(small["tokens_kept"]) == 80
    assert float(small["bytes_held"]) == float(full["bytes_held"]) / 2
    assert 0 < float(full["prefill_seconds"]) < float(full["total_seconds"])
    assert (full["difference"], full["pairs"], last["pairs"]) == ("", "0", "3")
    assert "DecodingEviction" in files(tmp_path)["own_words.160.with.snapkv_0.5.json"].decode()
    table = (tmp_path / "table.md").read_text().splitlines()
    assert table[0].startswith("| task | policy | n |")
    assert table[2].startswith("| own_words, 160 tokens | full_context | 3 | 100.0 [44, 100] |  |")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_question_known_or_asked_later(run: Run, tmp_path: Path) -> None:
    assert run(*arguments(tmp_path, lengths="160", limit=5))[0] == 0
    said = works(run(*arguments(tmp_path, lengths="160", limit=5), "--later"))
    assert "own_words, 160 tokens, asked later: exact_match" in said
    found = {(row["later"], row["policy"]): float(row["score"]) for row in rows(tmp_path)}
    assert found["False", "full_context"] == found["True", "full_context"] == 100
    assert found["False", "snapkv 0.2"] > found["True", "snapkv 0.2"]
    result = run(*arguments(tmp_path, tasks="own_choice"), "--later")
    assert result[0] == 1
    assert "question must be 'with' for the task 'own_choice'" in result[2]


@pytest.mark.parametrize(
    ("option", "more", "both"),
    [
        ("p", "fastkv", "fastkv,snapkv"),
        ("rate", "0.5", None),
        ("tasks", "own_choice", "own_words,own_choice"),
        ("lengths", "160", "96,160"),
        ("limit", 4, 4),
    ],
)
def test_a_folder_is_extended(
    run: Run, tmp_path: Path, option: str, more: object, both: object
) -> None:
    out, once = tmp_path / "out", tmp_path / "once"
    assert run(*arguments(out))[0] == 0
    before = answers(out)
    assert run(*arguments(out, **{option: more}))[0] == 0
    found = answers(out)
    if both is None:
        assert run(*arguments(once), "--rate", more)[0] == 0
    else:
        assert run(*arguments(once, **{option: both}))[0] == 0
    assert found == answers(once)
    assert (out / "settings.json").read_bytes() == (once / "settings.json").read_bytes()
    assert sum(len(each["samples"]) for each in found.values()) > 4
    for name, cell in before.items():
        assert found[name]["samples"][:2] == cell["samples"]
    shown = [{k: v for k, v in row.items() if "seconds" not in k} for row in rows(out)]
    assert shown == [{k: v for k, v in row.items() if "seconds" not in k} for row in rows(once)]


def counted(monkeypatch: pytest.MonkeyPatch, stop: int | None = None) -> list[tuple[str, int]]:
    """Note which documents are asked; raise KeyboardInterrupt in place of one."""
    asked: list[tuple[str, int]] = []
    answer = answering._answer

    def noting(prompts: Any, documents: Sequence[int], lm: Any) -> Any:
        if len(asked) == stop:
            raise KeyboardInterrupt
        asked.extend((type(lm.policy).__name__, number) for number in documents)
        return answer(prompts, documents, lm)

    monkeypatch.setattr(answering, "_answer", noting)
    return asked


def test_stopped_and_continued(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        asked = counted(patch, stop=3)
        status, said, err = run(*arguments(tmp_path))
    assert (status, err) == (130, "interrupted\n")
    assert asked == [("FullContext", 0), ("FullContext", 1), ("SnapKV", 0)]
    assert f"stopped; the same command continues with {tmp_path}" in said
    assert [row["n"] for row in rows(tmp_path)] == ["2", "1"]
    before = files(tmp_path)
    asked = counted(monkeypatch)
    said = works(run(*arguments(tmp_path)))
    assert asked == [("SnapKV", 1)]
    assert "snapkv 0.2: exact_match 1.000 of 2, 1 of them answered earlier" in said
    assert files(tmp_path)["own_words.96.with.full_context.json"] in before.values()
    assert run(*arguments(tmp_path, threads=None))[0] == 0  # with the folder's own threads
    assert asked == [("SnapKV", 1)]


def test_killed_and_continued(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, once = tmp_path / "out", tmp_path / "once"
    asked = {"lengths": "96,160", "p": "snapkv,fastkv,h2o", "limit": 5}
    command = [sys.executable, "-m", "kvpolicy.evaluation", *map(str, arguments(out, **asked))]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 120
        while len(list(out.glob("cells/*.json"))) < 3 and time.monotonic() < end:
            assert process.poll() is None
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = {cell.file: len(cell.samples) for cell in load_cells(out)}
    held = files(out)
    assert 3 <= len(before) < 8
    questions = counted(monkeypatch)
    assert run(*arguments(out, **asked))[0] == 0
    assert len(questions) == 2 * 4 * 5 - sum(before.values())
    for name, count in before.items():
        if count == 5:
            assert files(out)[name] == held[name]
    assert run(*arguments(once, **asked))[0] == 0
    assert answers(out) == answers(once)


def test_a_folder_of_something_else(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(*arguments(out))[0] == 0
    before = files(out)
    other, renamed = tmp_path / "other", tmp_path / "renamed"
    shutil.copytree(MODEL, other)
    shutil.copytree(MODEL, renamed)
    weights = load_file(other / "model.safetensors")
    weights[min(weights)] = torch.zeros_like(weights[min(weights)])
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    for changed, said in (
        (arguments(out, model=other), f"model was {MODEL}, got {other}; model's content was"),
        ([*arguments(out), "--dtype", "float32"], "dtype was bfloat16, got float32;"),
        ([*arguments(out), "--batch-size", 2], "where batch size was 1, got 2; give another --out"),
        (arguments(out, threads=2), "threads was 1, got 2"),
    ):
        status, _, err = run(*changed)
        assert status == 1
        assert f"or one of the same settings, got {out}, where" in err
        assert said in err
    status, _, err = run(*arguments(out), "--set", "window_size=4")
    assert status == 1
    assert "where snapkv 0.2 was SnapKV(" in err
    assert "window_size=8" in err
    assert "window_size=4" in err
    assert files(out) == before
    assert run(*arguments(out, model=renamed))[0] == 0


def test_changed_prompts_and_damaged_files(run: Run, tmp_path: Path) -> None:
    tasks, out = tmp_path / "tasks", tmp_path / "out"
    shutil.copytree(TASKS, tasks)
    assert run(*arguments(out, include=tasks))[0] == 0
    data, own = (tasks / "needles.jsonl"), out / "cells" / "own_words.96.with.snapkv_0.2.json"
    data.write_text(data.read_text().replace("<bos>", "<bos> f1", 1))
    making = tasks / "making.py"
    making.write_text(making.read_text() + "\n")  # the harness reads it again
    status, _, err = run(*arguments(out, include=tasks))
    assert status == 1
    assert "document 0 of own_words, 96 tokens was another: the task or its data has changed" in err
    whole = own.read_text()
    for text in (whole[:-40], "[]", whole.replace('"own_words"', '"other"'), '{"samples": []}'):
        own.write_text(text)
        status, _, err = run(*arguments(out))
        assert status == 1
        assert f"{own} is damaged (" in err
        assert err.endswith("remove it to have it answered again\n")
    own.unlink()
    assert run(*arguments(out))[0] == 0
    assert json.loads(own.read_text())["method"] == "snapkv 0.2"
    (out / "settings.json").write_text("{}")
    assert f"error: {out / 'settings.json'} is damaged (" in run(*arguments(out))[2]
    (out / "settings.json").unlink()
    assert "has cells but no settings.json; give another --out" in run(*arguments(out))[2]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"tasks": "own_word"}, "got 'own_word'; near: own_words"),
        ({"p": "snapvk"}, "snapkv"),
        ({"rate": 1.5}, "retention_rate must be"),
        ({"lengths": "4k"}, "--lengths must be numbers of tokens, such as 4096,8192, got '4k'"),
        ({"lengths": "96,0"}, "--lengths must be numbers of tokens, such as 4096,8192, got '96,0'"),
        ({"include": "nowhere"}, "--include must be a folder, got nowhere"),
        ({"model": "no/such/model"}, "model no/such/model does not exist"),
        ({"tasks": ","}, "--tasks must be names separated by commas, got ','"),
    ],
)
def test_bad_input_is_refused_before_a_model_is_loaded(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, str], said: str
) -> None:
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", None)
    fails(run(*arguments(tmp_path / "out", **other)), 1, said)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"lengths": "97"}, "task own_words could not be loaded at 97 tokens: "),
        ({"tasks": "own_texts"}, "tasks must ask for answers that are not run as code, got own_"),
        ({"tasks": "own_corpus"}, "have a score for each document, whose mean is the result, got "),
        ({"tasks": "ruler_vt"}, "lengths must be at least 1024 for ruler_vt, got 96"),
        ({"p": "fastkv", "set": "tsp_layer=9"}, "error: fastkv@9 0.2: tsp_layer must be in [0, 5]"),
    ],
)
def test_what_a_task_cannot_give_is_refused_before_anything_is_asked(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, Any], said: str
) -> None:
    monkeypatch.setattr(answering, "_answer", None)
    status, _, err = run(*arguments(tmp_path / "out", **other))
    assert (status, err.count("\n")) == (1, 1)
    assert said in err
    assert not (tmp_path / "out").exists()


def test_what_the_model_cannot_read(run: Run, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 90}))
    status, _, err = run(*arguments(tmp_path / "out", model=model))
    assert status == 1
    assert "prompts must fit into the 90 positions of" in err
    assert "got document 0 of own_words of 96 tokens and an answer of up to 3; give smaller" in err
    assert run(*arguments(tmp_path / "out", model=model), "--beyond-positions")[0] == 0
    fails(
        run(*arguments(tmp_path / "chat"), "--chat"),
        1,
        f"a model with a chat template, got {MODEL}",
    )


@pytest.mark.parametrize(("package", "extra"), [("lm_eval", "eval"), ("matplotlib", "plot")])
def test_a_missing_extra(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    said = f"{package} is not installed; get it with: pip install 'kvpolicy[{extra}]'"
    fails(run(*arguments(tmp_path / "out")), 1, said)


def test_ruler_of_the_harness() -> None:
    """Its prompts are for a length and our tokenizer, and the same each time."""
    tasks = find_tasks(["niah_single_1"], ())
    assert [*tasks] == ["niah_single_1"]
    assert "niah_multikey_3" in find_tasks(["ruler"], ())
    lm = PolicyLM(
        AutoModelForCausalLM.from_pretrained(MODEL), tokenizer=AutoTokenizer.from_pretrained(MODEL)
    )
    how = How((256,), 2, False, False, 1, False)
    (first,), (again,) = (make_prompts(tasks, how, lm) for _ in range(2))
    assert (first.name, first.length, len(first.requests)) == ("niah_single_1", 256, 2)
    assert [first.digest(it) for it in (0, 1)] == [again.digest(it) for it in (0, 1)]
    prompt = first.requests[0][0].args[0]
    assert "special magic" in prompt
    assert len(lm.tok_encode(prompt)) + 128 <= 256
