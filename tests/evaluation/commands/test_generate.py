"""`kvpolicy generate`: questions about a document that is read once, what it says of layers."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvpolicy.evaluation import load
from kvpolicy.evaluation.cli import main
from kvpolicy.evaluation.commands import terminal
from kvpolicy.integrations.transformers import ReadDocument
from kvpolicy.policies import KeyDiff
from tests.evaluation.support import NEEDLE, Run
from tests.needle import needle_prompts


def test_questions_about_a_document(run: Run, tmp_path: Path) -> None:
    """The document is read once; each answer is as if its question were the only one."""
    loaded = load(str(NEEDLE))
    asked = needle_prompts(128, count=2, seed=1)[0].input_ids
    document, question = loaded.tokenizer.decode(asked[:-2]), loaded.tokenizer.decode(asked[-2:])
    other = loaded.tokenizer.decode(asked[-2:-1]) + " s7"
    file = tmp_path / "document.txt"
    file.write_text(f"{document}\n")
    lines = ("--prompt-file", file, "-p", "keydiff", "--rate", 0.5, "--answer-tokens", 3)
    read = ReadDocument(loaded.model, loaded.tokenizer, document, KeyDiff(0.5))
    answers = read.answer([question, other], max_new_tokens=3, do_sample=False)
    status, out, err = run("generate", *lines, "--ask", question, "--ask", other)
    assert (status, out.splitlines()) == (0, answers)
    assert err.index(f"question: {question}") < err.index(f"question: {other}")
    assert f"KeyDiff(retention_rate=0.5), document of {len(asked) - 2} tokens, " in err
    assert str(read.cache.report()) in err
    assert "The document was read once. The table is of its cache" in err
    alone = run("generate", *lines, "--ask", other)
    assert alone[:2] == (0, f"{answers[1]}\n")
    sampled = ("generate", *lines, "--sample", "--seed", 3, "--ask", question)
    assert run(*sampled)[1] == run(*sampled, "--ask", question)[1].splitlines()[1] + "\n"


def test_prompts_and_questions_in_the_chat_template(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Document and question are one message, so that the template's text is around both."""
    loaded = load(str(NEEDLE))
    loaded.tokenizer.chat_template = (
        "{% for message in messages %}f1 {{ message['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}f2 f3{% endif %}"
    )
    monkeypatch.setattr(terminal, "load_shown", lambda *_, **__: loaded)
    for option, around in (([], 1), (["--chat"], 1), (["--no-chat"], 0)):
        more = ("-p", "full_context", "--answer-tokens", 4, *option)
        status, out, err = run("generate", "--prompt", "f4 f5 f6", "--ask", "s1", *more)
        assert f"document of {3 + around} tokens" in err
        whole = run("generate", "--prompt", "f4 f5 f6 s1", *more)
        assert (status, out) == whole[:2]
        assert f"prompt of {4 + 3 * around} tokens" in whole[2]


PROMPT = " ".join(["f1 f2 f3 f4 f5"] * 20)  # 100 tokens
Lines = Callable[..., list[str]]


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Lines:
    def said(*arguments: str) -> list[str]:
        assert main(["generate", "--prompt", PROMPT, "--no-chat", *arguments]) == 0
        return capsys.readouterr().err.splitlines()

    return said


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("snapkv", "read: 100 tokens by every layer"),
        (
            "fastkv --set tsp_layer=2 --set tsp_rate=0.2",
            "read: 100 tokens by layers 0 to 2, 20 tokens by layers 3 to 5",
        ),
        (
            "fastkv --set tsp_layer=4 --set tsp_rate=0.3",
            "read: 100 tokens by layers 0 to 4, 30 tokens by layer 5",
        ),
        ("fastkv --set tsp_layer=5 --set tsp_rate=0.3", "read: 100 tokens by every layer"),
        (
            "gemfilter --rate 0.2 --set filter_layer=3",
            "read: 100 tokens by layers 0 to 3, then the 20 that layer 3 chose by all layers",
        ),
        # By hand: 79 tokens before the last 21, and of these int(79 * 0.98), int(77 * 0.925), ...
        (
            "pyramidinfer",
            "read: 100 tokens by layers 0 to 1, 98 tokens by layer 2, 92 tokens by layers 3 to 5",
        ),
        (
            "pyramidinfer --set min_context=1",
            "read: 100 tokens by layer 0, fewer by later ones, 67 by layer 5",
        ),
    ],
)
def test_what_layers_read(lines: Lines, policy: str, said: str) -> None:
    assert said in lines("--answer-tokens", "1", "-p", *policy.split())


def test_what_layers_hold_of_prompt_and_answer(lines: Lines) -> None:
    """The last answer token is not read; a bounded answer evicts tokens of the prompt."""
    start = "held, mean over layers: "
    asked = ("-p", "streamingllm", "--rate", "0.2")
    (whole,) = [each for each in lines(*asked, "--answer-tokens", "6") if each.startswith(start)]
    assert whole == f"{start}20.0 tokens of the prompt, 5.0 of the 5 answer tokens read"
    bound = ("--decoding-tokens", "8", "--decoding-every", "5", "--answer-tokens", "6")
    (bounded,) = [each for each in lines(*asked, *bound) if each.startswith(start)]
    assert bounded == f"{start}4.0 tokens of the prompt, 4.0 of the 5 answer tokens read"
    assert not any(start in each for each in lines(*asked, "--answer-tokens", "1"))
