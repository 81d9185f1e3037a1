"""Prompts shortened by another model: what they are held against, and the page's table."""

import json
from pathlib import Path

from benchmarks.compress import RESULTS, in_lines, middle_cut, table
from kvpolicy.evaluation.tasks.ruler_words import WordPrompt, load_tokenizer, prompts

PAGE = Path(__file__).parents[2] / "docs" / "compress.md"


def test_the_middle_is_cut_out() -> None:
    document = " ".join(f"w{i}" for i in range(17))
    prompt = WordPrompt("single", document, "name x :", (), "")
    assert middle_cut(prompt, 0.4).split() == ["w0", "w1", "w2", "w3", "w16", "name", "x", ":"]
    assert middle_cut(prompt, 0.01) == "name x :"


def test_lines_are_the_same_to_the_model() -> None:
    tokenizer, prompt = load_tokenizer(), prompts("two-hop", length=256, count=1)[0]
    lines = in_lines(prompt.input)
    assert lines.count("\n") > 10
    assert tokenizer(lines).input_ids == tokenizer(prompt.input).input_ids


def test_the_table_is_that_of_the_results() -> None:
    data = json.loads(RESULTS.read_text())
    assert table(data) in PAGE.read_text()
    assert data["settings"]["count"] >= 50
