"""`kvpolicy compare`: what it prints and writes, and what it refuses before anything is read."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.evaluation.commands.compare import SHOWN
from kvpolicy.evaluation.comparison import study
from kvpolicy.registry import registered
from tests.evaluation.support import Run, works
from tests.evaluation.tokenizers import tiny_tokenizer

QUICK = ("--context", 300, "--count", 2, "--rounds", 1, "--answer-tokens", 1, "--threads", 1)
LINES = (
    {"context": "One hat is red, the other blue.", "question": "Which?", "answer": "red"},
    {"context": "Two lamps burn all night.", "question": "How many?", "answers": ["two", "2"]},
)


def written(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_table_file_and_picture(run: Run, folder: Path, tmp_path: Path) -> None:
    asked = ("-p", "snapkv,fastkv", "-r", 0.2, "-r", 0.5, "--task", "needles,lines")
    status, _, err = run("compare", "--model", folder, *asked, *QUICK)
    assert (status, "task must be" in err) == (1, True)
    out = tmp_path / "out"
    asked = (*asked[:-1], "needles", "--task", "lines", "--out", out)
    shown = works(run("compare", "--model", folder, *asked, *QUICK))
    lines = shown[shown.index("\npolicy ") + 1 :].splitlines()
    assert max(map(len, lines[: lines.index("")])) <= 80
    names = [line.split()[0] for line in lines if line.strip()]
    assert names[: names.index("nats")] == [
        *("policy", "full_context", "keeping", "snapkv", "fastkv", "keeping", "snapkv", "fastkv")
    ]
    assert "keeping 20%" in [line.strip() for line in lines]
    assert "Keeping 50%, no clear difference from full context: snapkv, fastkv." in lines
    data = json.loads((out / "compare.json").read_text())
    assert data["settings"]["tasks"] == ["needles", "lines"]
    assert data["settings"]["model"] == str(folder)
    assert (data["questions"], data["finished"], data["later"]) == (4, True, False)
    rows = data["rows"]
    assert [(row["policy"], row["retention_rate"]) for row in rows] == [
        *(("full_context", None), ("snapkv", 0.2), ("snapkv", 0.5)),
        *(("fastkv", 0.2), ("fastkv", 0.5)),
    ]
    assert rows[1]["parameters"] == {"retention_rate": 0.2}
    assert rows[1]["total"]["held"] == pytest.approx(0.2, abs=0.01)
    assert set(rows[0]["kinds"]) == {"word", "number", "lines"}
    assert [("seconds" in row) for row in rows] == [True, False, True, False, True]
    assert len(data["outcomes"]) == 4 * 5
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")
    held = [line.split() for line in lines if line.startswith("snapkv")]
    assert [row[-1] if index == 0 else row[-3] for index, row in enumerate(held)] == [
        f"{100 * row['total']['held']:.1f}" for row in rows[1:3]
    ]


def test_a_question_that_comes_later(run: Run, folder: Path, tmp_path: Path) -> None:
    """What is held differs by the question's tokens."""
    found = {}
    file = written(tmp_path / "own.jsonl", *LINES)
    for name, option in (("known", ()), ("later", ("--later",))):
        asked = ("-p", "streamingllm", "-r", 0.5, "--task", file, "--out", tmp_path / name)
        shown = works(run("compare", "--model", folder, *asked, *QUICK, *option))
        assert ("the question asked later" in shown) is (name == "later")
        data = json.loads((tmp_path / name / "compare.json").read_text())
        found[name] = [each["seen"] for each in data["outcomes"]]
    assert all(known > later for known, later in zip(found["known"], found["later"], strict=True))


def test_a_continuation_has_no_answers(run: Run, folder: Path) -> None:
    asked = ("-p", "snapkv", "--task", "continuation", "--context", 200, "--count", 1)
    shown = works(run("compare", "--model", folder, *asked, "--rounds", 0))
    assert re.search(r"^policy +lost +% *$", shown, flags=re.MULTILINE)
    assert "right" not in shown.partition("nats lost:")[0]


def test_a_row_for_each_layer(run: Run, folder: Path) -> None:
    asked = ("-p", "snapkv,fastkv", "-r", 0.2, "--tsp-layers", "1,2", "--rounds", 0)
    shown = works(run("compare", "--model", folder, *QUICK[:4], *asked))
    names = [" ".join(line.split()[:2]) for line in shown.splitlines() if "kv" in line[:8]]
    assert [name for name in names if name.startswith("fastkv")] == ["fastkv @1", "fastkv @2"]
    assert sum(name.startswith("snapkv") for name in names) == 1


def ended_after(count: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """End a comparison after some outcomes."""
    real = study.outcomes

    def ending(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for index, each in enumerate(real(*args, **kwargs)):
            if index == count:
                raise error
            yield each

    monkeypatch.setattr(study, "outcomes", ending)


def test_what_is_done_is_kept(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole questions: the second one was put to full context only."""
    ended_after(3, KeyboardInterrupt(), monkeypatch)
    asked = ("-p", "snapkv", "-r", 0.5, "--out", tmp_path)
    status, shown, err = run("compare", "--model", folder, *asked, *QUICK)
    assert (status, err) == (130, "interrupted\n")
    assert "stopped after 1 questions" in shown
    data = json.loads((tmp_path / "compare.json").read_text())
    assert (data["finished"], data["questions"], len(data["outcomes"])) == (False, 1, 2)


def test_nothing_is_kept_of_nothing(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended_after(1, KeyboardInterrupt(), monkeypatch)
    asked = ("-p", "snapkv", "-r", 0.5, "--out", tmp_path / "out")
    status, shown, err = run("compare", "--model", folder, *asked, *QUICK)
    assert (status, err) == (130, "interrupted\n")
    assert "full_context" not in shown
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "names"),
    [((), SHOWN), (("--all",), tuple(registered("policy"))), (("-p", "tova"), ("tova",))],
)
def test_which_policies_are_compared(
    run: Run, folder: Path, arguments: tuple[str, ...], names: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def refuse(model: Any, tokenizer: Any, questions: Any, chosen: Any, **_: Any) -> None:
        found.extend(dict.fromkeys(each.name for each in chosen))
        raise ValueError("seen")

    monkeypatch.setattr(study, "compare", refuse)
    assert run("compare", "--model", folder, *QUICK, *arguments)[0] == 1
    assert tuple(found) == tuple(names)
    assert len(SHOWN) + 1 <= 12
    assert set(SHOWN) <= set(registered("policy"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"context": "f1", "question": "f2"}, "line 2 of FILE must be a JSON object"),
        ({"context": " ", "question": "f2", "answer": "f3"}, "got context ' '"),
        ([1], "line 2 of FILE must be a JSON object"),
        ({"context": "f1 " * 2000, "question": "f2", "answer": "f3"},
         "line 2 of FILE must be a prompt of at most 1,500 tokens"),
    ],
)  # fmt: skip
def test_bad_questions_name_their_line(run: Run, tmp_path: Path, line: Any, said: str) -> None:
    file = tmp_path / "own.jsonl"
    written(file, {"context": "f1 f2", "question": "f3", "answer": "f4"}, line)
    status, _, err = run("compare", "--task", file)
    assert status == 1
    assert said.replace("FILE", str(file)) in err


def test_prompts_that_are_too_long(run: Run, folder: Path) -> None:
    status, _, err = run("compare", "--model", folder, "-p", "snapkv", "--context", 2000)
    assert (status, len(err.splitlines())) == (1, 1)
    assert "prompts must fit into the model's 1,024 positions, got one of " in err


def test_a_model_without_a_template_and_first_token(run: Run, folder: Path, tmp_path: Path) -> None:
    """Untuned models are asked in plain words."""
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "model" / name).symlink_to(folder / name)
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    asked = ("-p", "snapkv", "-r", 0.5, "--rounds", 0)
    shown = works(run("compare", "--model", tmp_path / "model", *asked, *QUICK[:4]))
    assert "full_context" in shown


def test_progress_is_a_line_for_each_stage(run: Run, folder: Path) -> None:
    """Into a pipe or a file; on a terminal it is a bar."""
    _, shown, _ = run("compare", "--model", folder, "-p", "snapkv", "-r", 0.5, *QUICK)
    assert [line for line in shown.splitlines() if line.endswith("...")] == [
        "questions ...",
        "times ...",
    ]


def test_a_composition_at_numbers_of_tokens_under_a_bound(
    run: Run, folder: Path, tmp_path: Path
) -> None:
    asked = ("-p", "snapkv", "--scorer", "last_query", "--retention-tokens", 24)
    bound = ("--decoding-tokens", 24, "--decoding-every", 4)
    shown = works(run("compare", "--model", folder, *asked, *bound, *QUICK, "--out", tmp_path))
    assert "keeping 24 tokens" in shown
    rows = json.loads((tmp_path / "compare.json").read_text())["rows"]
    assert [row["policy"] for row in rows] == ["full_context", "snapkv", "last_query_scorer"]
    assert "every=4" in rows[1]["parameters"]["decoding"]
