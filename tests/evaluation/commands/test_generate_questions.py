"""Questions of `kvpolicy generate` about a document that is read once."""

from pathlib import Path

import pytest

from kvpolicy.evaluation import load
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
