from pathlib import Path

import pytest

from kvpolicy.evaluation.cli import main
from kvpolicy.evaluation.needle import load_tokenizer
from kvpolicy.registry import registered
from tests.integrations.model.builds.catalogue import builds


def saved(name: str, folder: Path) -> str:
    builds()[name].model().save_pretrained(folder)
    load_tokenizer().save_pretrained(folder)
    return str(folder)


def rows_of(out: str) -> dict[str, str]:
    """What can be applied, by policy; what a row goes on with in further lines is left out."""
    names = set(registered("policy"))
    lines = [line.split(maxsplit=1) for line in out.splitlines()]
    return {line[0]: line[1] for line in lines if len(line) == 2 and line[0] in names}


def test_the_bundled_model_works_with_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "needle"]) == 0
    out = capsys.readouterr().out
    assert "LlamaForCausalLM (llama)" in out
    assert "6 layers of full attention" in out
    assert {each.strip() for each in rows_of(out).values()} == {"yes"}
    assert set(rows_of(out)) == set(registered("policy"))
    assert max(map(len, out.splitlines())) <= 80


def test_a_model_of_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", saved("llava", tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "LlavaForConditionalGeneration" in out
    assert rows_of(out)["fastkv"].strip() == "yes"


def test_kinds_and_windows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At a length that windows do not see, what drops after one is refused, with the reason."""
    assert main(["check", saved("gemma2", tmp_path), "--context", "40"]) == 0
    out = capsys.readouterr().out
    assert "layers of sliding window" in out
    assert rows_of(out)["fastkv"].strip() == "yes"
    assert rows_of(out)["gemfilter"].startswith("no: context must fit the sliding")


def test_what_cannot_work_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", saved("bloom", tmp_path)]) == 1
    out = capsys.readouterr().out
    assert all(each.startswith("no: scores of attention must") for each in rows_of(out).values())


def test_reasons_name_classes_in_sentences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", saved("gptj", tmp_path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "no: AdaKV cannot be applied to GPTJForCausalLM, whose attention" in out
    assert "()" not in out


def test_attention_that_shows_no_queries(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", saved("gptj", tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "attention shows no queries: policies that look at them cannot be applied" in out
    work = {name for name, each in rows_of(out).items() if each.strip() == "yes"}
    assert work == {
        "full_context",
        "streamingllm",
        "key_norm",
        "keydiff",
        "lagkv",
        "curdkv",
        "random",
    }
