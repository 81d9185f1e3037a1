"""Questions from files of JSON lines, and what is said of wrong ones."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.evaluation.tasks.files import Files
from kvpolicy.evaluation.tasks.question import any_answer, share_of_answers
from tests.evaluation.tokenizers import TOKENIZERS

ENTRY: dict[str, Any] = {"context": "They love 12.", "question": "What?", "answer": "12"}


def written(folder: Path, *entries: dict[str, Any] | str) -> Files:
    lines = [
        each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in entries
    ]
    file = folder / "asked.jsonl"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return Files(file, new_tokens=5)


def test_reads_the_lines_in_order(tmp_path: Path) -> None:
    several = {"context": "a\u2028b", "question": "c?", "answers": ["d", "e"], "source": "f"}
    task = written(tmp_path, ENTRY, "", several, ENTRY)
    first, second = task.questions(TOKENIZERS["chat"], 200, 2)
    assert first.question.document == "They love 12."
    assert first.question.question == "What?"
    assert first.question.answers == ("12",)
    assert first.question.kind == "asked"
    assert (first.question.new_tokens, first.question.one_line) == (5, False)
    assert (second.question.document, second.question.answers) == ("a\u2028b", ("d", "e"))
    assert second.question.score("it is E.", second.question.answers) == 1
    assert len(task.questions(TOKENIZERS["chat"], 200, 10)) == 3


def test_a_plain_question_is_continued(tmp_path: Path) -> None:
    plain = {**ENTRY, "question": " I love", "answer": " 12", "plain": True}
    tokenizer = TOKENIZERS["chat"]
    (asked,) = written(tmp_path, plain).questions(tokenizer, 200, 1)
    shown = tokenizer.decode(asked.document_ids + asked.question_ids, skip_special_tokens=True)
    assert shown == "They love 12. I love"
    assert tokenizer.decode(asked.answer_ids) == " 12"


WRONG: dict[str, tuple[dict[str, Any] | str, str]] = {
    "no JSON": ('{"context": ', "got Expecting value at column 13"),
    "no object": ("[1]", "got list"),
    "no answer": ({"context": "a", "question": "b"}, "not blank, got an answer None"),
    "no answers": ({**ENTRY, "answers": []}, "got answers=[]"),
    "one text of answers": ({**ENTRY, "answers": "12"}, "got answers='12'"),
    "a number": ({**ENTRY, "answer": 12}, "got an answer 12"),
    "a blank answer": ({**ENTRY, "answers": ["12", " "]}, "got an answer ' '"),
    "no context": ({"question": "b", "answer": "c"}, "got context None"),
    "a blank question": ({**ENTRY, "question": "\n"}, "got question '\\n'"),
    "plain as a text": ({**ENTRY, "plain": "yes"}, "must have true or false as plain, got 'yes'"),
    "too long": ({**ENTRY, "context": 300 * "a "}, "must be a prompt of at most 200 tokens, got"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_line_is_named(tmp_path: Path, case: str) -> None:
    line, said = WRONG[case]
    task = written(tmp_path, ENTRY, "", line)
    message = rf"^line 3 of {re.escape(str(task.file))}.*{re.escape(said)}"
    with pytest.raises(ValueError, match=message):
        task.questions(TOKENIZERS["chat"], 200, 5)
    assert len(task.questions(TOKENIZERS["chat"], 200, 1)) == 1  # what is not asked is not read


def test_a_file_without_questions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"asked\.jsonl is empty"):
        written(tmp_path, "", " ").questions(TOKENIZERS["bare"], 100, 1)
    with pytest.raises(ValueError, match=r"none\.jsonl does not exist"):
        Files(tmp_path / "none.jsonl").questions(TOKENIZERS["bare"], 100, 1)


def test_answers_are_whole_words_in_any_case() -> None:
    assert any_answer("The Falcon, of course", ["eagle", " falcon "]) == 1
    assert any_answer("falcons", ["falcon"]) == 0
    assert any_answer("a+b (c)", ["+b (c)"]) == 0
    assert any_answer("a +b (c)", ["+b (c)"]) == 1
    assert share_of_answers("4322", ["4322", "432"]) == 0.5
