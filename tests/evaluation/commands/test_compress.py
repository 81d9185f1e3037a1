"""`kvpolicy compress`: what it writes, and one line for whatever a user can get wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.evaluation import FilterLayerScorer, LookAheadScorer, compress_prompt
from kvpolicy.evaluation.cli import main
from kvpolicy.evaluation.tasks.ruler_words import load_model, load_tokenizer, prompts
from kvpolicy.policies import LastQueryScorer
from tests.evaluation.support import Run

PROMPT = prompts("multi-key", length=256, count=1, seed=5)[0]


@pytest.fixture
def run(run: Run, tmp_path: Path) -> Run:
    prompt_file = tmp_path / "prompt.txt"
    prompt_file.write_text(PROMPT.input + "\n")

    def compress(*arguments: object) -> tuple[int, str, str]:
        if not {"--prompt-file", "--chat-file"} & set(map(str, arguments)):
            arguments += ("--prompt-file", prompt_file)
        return run("compress", "--model", "ruler_words", *arguments)

    return compress


def expected(prompt: Any = PROMPT.input, **settings: Any) -> Any:
    return compress_prompt(load_model(), load_tokenizer(), prompt, **settings)


def test_text_to_stdout_and_the_report_to_stderr(run: Run) -> None:
    want = expected(rate=0.3, chunk_size=16)
    status, out, err = run("--rate", 0.3, "--chunk-size", 16)
    assert (status, out) == (0, want.text + "\n")
    assert want.report() in err
    assert max(map(len, err.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ((), {"rate": 0.2, "scorer": LookAheadScorer()}),
        (("--look-ahead", 2, "--kernel-size", 3), {"scorer": LookAheadScorer(2, 3)}),
        (("--filter-layer", 4), {"scorer": FilterLayerScorer(filter_layer=4)}),
        (("--tokens", 90), {"tokens": 90}),
        (("--scorer", "last-query"), {"scorer": FilterLayerScorer(LastQueryScorer())}),
        (("--keep", "they call", "--gap", " / "), {"keep": ["they call"], "gap": " / "}),
        (("--align", "token", "--chunk-size", 7), {"align": "token", "chunk_size": 7}),
    ],
)  # fmt: skip
def test_options_reach_the_function(
    run: Run, arguments: tuple[Any, ...], settings: dict[str, Any]
) -> None:
    want = expected(**settings)
    status, out, err = run(*arguments)
    assert (status, out) == (0, want.text + "\n")
    assert f"scored by {want.source}" in err


def test_ids_and_files(run: Run, tmp_path: Path) -> None:
    want = expected()
    assert json.loads(run("--ids")[1]) == list(want.ids)
    out, numbers = tmp_path / "new" / "out.txt", tmp_path / "numbers.json"
    status, shown, err = run("--out-file", out, "--json", numbers)
    assert (status, shown, out.read_text()) == (0, "", want.text + "\n")
    assert f"written to {out}" in err
    data = json.loads(numbers.read_text())
    assert data["settings"]["model"] == "ruler_words"
    assert data["ids"] == list(want.ids)
    assert len(data["chunks"]) == len(want.chunks)


def test_requests(run: Run, tmp_path: Path) -> None:
    want = expected()
    chat = {"model": "served", "messages": [{"role": "user", "content": want.text}]}
    assert json.loads(run("--request", "served")[1]) == chat
    ids = {"model": "served", "prompt": list(want.ids)}
    assert json.loads(run("--request", "served", "--ids")[1]) == ids

    messages = [
        {"role": "system", "content": "call it"},
        {"role": "user", "content": PROMPT.document},
        {"role": "user", "content": PROMPT.question, "keep": True},
    ]
    body = tmp_path / "body.json"
    body.write_text(json.dumps({"model": "other", "temperature": 0, "messages": messages}))
    request = json.loads(run("--chat-file", body, "--request", "served")[1])
    shorter = expected(messages)
    assert request == {
        "model": "served",
        "temperature": 0,
        "messages": [dict(each) for each in shorter.messages],
    }
    assert request["messages"][2] == {"role": "user", "content": PROMPT.question}
    assert len(request["messages"][1]["content"]) < len(PROMPT.document) / 2
    body.write_text(json.dumps(messages))
    assert run("--chat-file", body)[1] == shorter.text + "\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--rate", 1.5), "rate must be in (0, 1], got 1.5"),
        (("--rate", 0.2, "--tokens", 90), "at most one of rate and tokens may be given"),
        (("--tokens", 9), "tokens must be at least "),
        (("--filter-layer", 6), "filter_layer must be in [0, 5] for a model of 6 layers, got 6"),
        (
            ("--filter-layer", 2, "--kernel-size", 3),
            "--kernel-size must not be given with --scorer or --filter",
        ),
        (("--scorer", "best"), "no scorer is named 'best'; known: accumulated"),
        (("--kernel-size", 4), "kernel_size must be odd"),
        (("--align", "page"), "align must be one of line, word, token, got 'page'"),
        (("--keep", "nowhere"), "each of keep must be in the prompt, got 'nowhere'"),
        (("--chat",), "chat needs a tokenizer with a chat template"),
        (("--prompt-file", "no-such.txt"), "prompt file no-such.txt does not exist"),
        (("--chat-file", "no-such.json"), "chat file no-such.json does not exist"),
        (("--out-file", "/"), "--out-file must be a file, got the folder /"),
        (("--json", f"{__file__}/x"), "--json must be a file in a folder"),
    ],
)
def test_bad_input(run: Run, arguments: tuple[Any, ...], said: str) -> None:
    status, out, err = run(*arguments)
    lines = [line for line in err.splitlines() if line.strip()]
    assert (status, out, len(lines)) == (1, "", 1)
    assert lines[0].startswith("error: ")
    assert said in lines[0]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty"),
        ("{", "must be JSON, got something else"),
        ("3", "must hold a list of messages"),
        ('{"prompt": "x"}', "must hold a list of messages"),
        ('["x"]', "message 1 must be"),
        ('[{"role": "user", "content": ["x"]}]', "content of message 1 must be a text"),
        ('[{"role": "user", "content": "x", "keep": "y"}]', "must be in its content, got 'y'"),
        ("[]", "at least one message with content"),
    ],
)
def test_bad_chats(run: Run, tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "chat.json"
    file.write_text(content)
    status, out, err = run("--chat-file", file)
    assert (status, out) == (1, "")
    assert said in err
    assert err.count("\n") == 1


def test_one_prompt(run: Run) -> None:
    assert main(["compress"]) == 1
    status, _, err = run("--prompt-file", __file__, "--chat-file", __file__)
    assert status == 1
    assert "one of --prompt-file and --chat-file must be given, got both" in err
