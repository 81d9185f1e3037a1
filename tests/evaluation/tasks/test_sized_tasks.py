"""What is true of every task whose documents have any size, with every kind of tokenizer."""

import json
import re
from pathlib import Path
from pydoc_data.topics import topics
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.evaluation.asking import Asked, Asker
from kvpolicy.evaluation.tasks.completion import Completion
from kvpolicy.evaluation.tasks.continuation import Continuation
from kvpolicy.evaluation.tasks.lines import Lines
from kvpolicy.evaluation.tasks.needles import KINDS, Needles
from kvpolicy.evaluation.tasks.pairs import Pairs
from kvpolicy.evaluation.tasks.question import Question
from kvpolicy.evaluation.tasks.task import SizedTask, depth_of
from kvpolicy.evaluation.texts import sources
from tests.evaluation.tokenizers import TOKENIZERS

TOKENS = 1200
# Most tokens that another unit of each task takes; tiny tokenizers have long texts.
TASKS: list[tuple[SizedTask, int]] = [
    *((Needles((kind,)), 120) for kind in KINDS),
    (Needles(), 120),
    (Lines(), 60),
    *((Pairs(digits), 4 * digits + 40) for digits in (4, 8, 16, 32)),
    (Completion(), 120),
    (Continuation(), 120),
]
NAMES = [f"{task}" for task, _ in TASKS]


class Units(SizedTask):
    """A document of some units, each of three tokens, after one drawn letter."""

    name = "units"
    smallest = 2

    def draft(self, size: int, index: int, rng: Random) -> Question:
        text = rng.choice("abcdefgh") + size * "xyz"
        return Question(document=text, question="?", answers=(str(index),), kind="units")


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(("task", "unit"), TASKS, ids=NAMES)
def test_prompts_are_as_long_as_they_may_be(task: SizedTask, unit: int, name: str) -> None:
    questions = task.questions(TOKENIZERS[name], TOKENS, 6, seed=3)
    lengths = [each.prompt_len for each in questions]
    assert max(lengths) <= TOKENS
    if not isinstance(task, Completion):  # a line near the beginning of its file has no more
        assert min(lengths) > TOKENS - unit


@pytest.mark.parametrize(("task", "unit"), TASKS, ids=NAMES)
def test_a_seed_gives_the_same_questions(task: SizedTask, unit: int) -> None:
    tokenizer = TOKENIZERS["bare"]
    found = task.questions(tokenizer, TOKENS, 5, seed=1)
    assert task.questions(tokenizer, TOKENS, 5, seed=1) == found
    assert task.questions(tokenizer, TOKENS, 3, seed=1) == found[:3]
    others = task.questions(tokenizer, TOKENS, 5, seed=2)
    assert not {each.document_ids for each in others} & {each.document_ids for each in found}
    assert len({each.document_ids for each in found}) == 5


@given(st.integers(20, 400), st.sampled_from(sorted(TOKENIZERS)))
def test_the_largest_size_is_found(tokens: int, name: str) -> None:
    """Against counting upwards."""
    asker = Asker(TOKENIZERS[name])

    def made(size: int) -> Asked:
        return asker.ask(Units().draft(size, 0, Random("units 0 0")))

    try:
        (found,) = Units().questions(TOKENIZERS[name], tokens, 1)
    except ValueError:
        assert made(2).prompt_len > tokens
        return
    size = 2
    while size < tokens and made(size + 1).prompt_len <= tokens:
        size += 1
    assert found == made(size)


@pytest.mark.parametrize(("task", "unit"), TASKS, ids=NAMES)
def test_too_few_tokens_are_refused(task: SizedTask, unit: int) -> None:
    said = rf"tokens must be at least \d+ for a prompt of {task.name} with this tokenizer, got 1"
    with pytest.raises(ValueError, match=said):
        task.questions(TOKENIZERS["chat"], 1, 1)
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        task.questions(TOKENIZERS["chat"], TOKENS, 0)


def test_the_least_number_of_tokens_is_enough() -> None:
    with pytest.raises(ValueError, match="at least") as caught:
        Lines().questions(TOKENIZERS["bare"], 10, 1)
    least = int(str(caught.value).split("at least ")[1].split()[0])
    (found,) = Lines().questions(TOKENIZERS["bare"], least, 1)
    assert found.prompt_len == least


@pytest.mark.parametrize("count", [1, 2, 5, 8, 16, 100])
def test_depths_are_spread_evenly(count: int) -> None:
    """Of any number of equal parts, each has about as many."""
    depths = sorted(depth_of(index) for index in range(count))
    gaps = [after - before for before, after in zip([0.0, *depths], [*depths, 1.0], strict=True)]
    assert max(gaps) < 2.62 / (count + 1)


def asked_of(task: SizedTask, count: int = 24, tokens: int = TOKENS) -> list[Question]:
    return [each.question for each in task.questions(TOKENIZERS["bare"], tokens, count)]


def test_needles_are_in_their_documents_once() -> None:
    for question in asked_of(Needles()):
        assert question.document.count(question.prefix) == (question.kind != "values")
        for answer in question.answers:
            assert question.document.count(f" {answer}.") == 1
        places = [question.document.index(answer) for answer in question.answers]
        assert places == sorted(places)
        assert question.score(question.expected, question.answers) == 1
        facts = question.document.count("special magic number")
        assert facts == {"word": 0, "number": 1, "keys": 4, "values": 2}[question.kind]


def test_needles_follow_sentences_and_paragraphs() -> None:
    for question in asked_of(Needles(("number",))):
        before, found, after = question.document.partition("The special magic number of")
        assert found
        assert not before or before.endswith("\n\n") or before.rstrip().endswith(".")
        assert not after.partition(".")[2] or after.partition(".")[2][0].isspace()


def test_the_kinds_of_needles_take_turns_at_the_same_depths() -> None:
    questions = asked_of(Needles(), tokens=5000)  # in short documents a table is a large part
    assert [each.kind for each in questions[:5]] == [*KINDS, "word"]
    depths = {
        kind: [
            each.document.index(each.answers[0]) / len(each.document)
            for each in questions
            if each.kind == kind
        ]
        for kind in ("word", "number", "keys")
    }
    for kind in depths:
        expected = [depth_of(index) for index in range(6)]
        assert depths[kind] == pytest.approx(expected, abs=0.1)


def test_unknown_kinds_of_needles_are_refused() -> None:
    for kinds in ((), ("word", "hair")):
        with pytest.raises(ValueError, match="kinds must be among word, number, keys, values"):
            Needles(kinds)


def test_lines_name_a_line_of_the_list() -> None:
    for index, question in enumerate(asked_of(Lines())):
        lines = question.document.split("\n")[2:]
        assert len({line.split(":")[0] for line in lines}) == len(lines)
        at = int(depth_of(index) * len(lines))
        assert lines[at] == question.prefix + question.expected
        assert question.expected == f"{question.answers[0]}>"


@pytest.mark.parametrize("digits", [4, 8, 16, 32])
def test_pairs_are_of_a_json_object(digits: int) -> None:
    for index, question in enumerate(asked_of(Pairs(digits), count=8)):
        pairs = json.loads(question.document)
        key = json.loads(question.prefix.partition(":")[0])
        assert list(pairs).index(key) == int(depth_of(index) * len(pairs))
        assert pairs[key] == question.answers[0]
        assert json.loads("{" + question.prefix + question.expected + "}") == {key: pairs[key]}
        assert all(len(each.replace("-", "")) == digits for each in (*pairs, *pairs.values()))
    with pytest.raises(ValueError, match="digits"):
        Pairs(5)


def source_texts() -> list[str]:
    texts = (file.read_text(encoding="utf-8") for file in sources())
    return ["\n".join(line.rstrip() for line in text.split("\n")) for text in texts]


def test_a_line_to_complete_needs_an_earlier_one() -> None:
    texts = source_texts()
    for question in asked_of(Completion(), count=8):
        text = question.document + question.question + question.expected
        assert any(text in each for each in texts)
        assert question.question.count("\n") == 10
        line = question.expected.strip()
        names, last = (set(re.findall(r"\w{5,}", each)) for each in (line, question.question))
        assert names - last
        assert question.score(f"\n\n   {line}   \nand more", question.answers) == 1


def test_a_source_is_not_longer_than_its_file() -> None:
    (asked,) = Completion().questions(TOKENIZERS["bare"], 100_000, 1)
    text = asked.question.document + asked.question.question
    assert any(text == each[: len(text)] for each in source_texts())
    assert asked.prompt_len < 100_000


def test_a_continuation_continues_the_documentation() -> None:
    question = asked_of(Continuation(), count=1)[0]
    assert not question.new_tokens
    text = question.document + question.expected
    assert question.expected[0].isspace()
    assert not question.document[-1].isspace()
    start = next(topic.strip() for topic in topics.values() if text.startswith(topic.strip()[:200]))
    assert text.startswith(start[: len(text)])


def test_a_continuation_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text(" ".join(str(number) for number in range(1000)))
    task = Continuation(file, length=7)
    starts = []
    for asked in task.questions(TOKENIZERS["bare"], 300, 12):
        text = asked.question.document + asked.question.expected
        numbers = [int(word) for word in text.split()]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert len(asked.answer_ids) == 7
        starts.append(numbers[0])
    assert min(starts) < 300
    assert max(starts) > 500


def test_a_short_file_has_no_continuation(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("one two three")
    with pytest.raises(ValueError, match=r"text\.txt must have at least \d+ words"):
        Continuation(file, length=7).questions(TOKENIZERS["bare"], 300, 1)
    with pytest.raises(ValueError, match=r"text file .*none\.txt does not exist"):
        Continuation(tmp_path / "none.txt").questions(TOKENIZERS["bare"], 300, 1)
    with pytest.raises(ValueError, match="length"):
        Continuation(length=0)
