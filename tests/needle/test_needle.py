"""The needle task: what a prompt holds, and that the model answers it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.evaluation.tasks.files import Files
from tests.needle import (
    NeedlePrompt,
    NeedleTask,
    exact_match,
    load_model,
    load_tokenizer,
    needle_prompts,
    write_questions,
)
from tests.needle.task import MAX_PAIRS
from tests.needle.vocabulary import BOS, END, KEY, LINK, QUERY, QUERY2, SYMBOLS

tasks = st.builds(
    NeedleTask, context_len=st.integers(240, 400), hops=st.sampled_from([1, 2]),
    num_pairs=st.integers(1, MAX_PAIRS),
)  # fmt: skip


def solve(prompt: NeedlePrompt) -> tuple[int, ...]:
    """Answer by reading: collect the pairs and links from left to right, then look up."""
    ids, pairs, links = prompt.input_ids, {}, {}
    for index, token in enumerate(ids):
        if token == KEY:
            stop = ids.index(END, index)
            pairs[ids[index + 1]] = ids[index + 2 : stop]
        elif token == LINK:
            links[ids[index + 1]] = ids[index + 2]
    kind, name = ids[-2:]
    return pairs[name] if kind == QUERY else pairs[links[name]]


@given(task=tasks, seed=st.integers())
def test_a_reader_finds_the_answer_in_a_prompt_of_exact_length(task: NeedleTask, seed: int) -> None:
    for prompt in task.prompts(2, seed):
        assert len(prompt.input_ids) == task.context_len
        assert prompt.input_ids[0] == BOS
        assert prompt.input_ids[-2] == (QUERY, QUERY2)[task.hops - 1]
        assert prompt.hops == task.hops
        assert solve(prompt) == prompt.answer


@given(task=tasks, seed=st.integers())
def test_symbols_are_distinct_so_that_only_one_pair_answers(task: NeedleTask, seed: int) -> None:
    ids = task.prompts(1, seed)[0].input_ids
    pairs = [ids[at + 1 : ids.index(END, at)] for at, token in enumerate(ids) if token == KEY]
    names = [ids[at + 1] for at, token in enumerate(ids) if token == LINK]
    targets = [ids[at + 2] for at, token in enumerate(ids) if token == LINK]
    symbols = [symbol for pair in pairs for symbol in pair] + names
    assert len(pairs) == len(names) == task.num_pairs
    assert len(set(symbols)) == len(symbols) == task.num_pairs * 5
    assert set(symbols) <= set(SYMBOLS)
    assert sorted(targets) == sorted(pair[0] for pair in pairs)


def test_depth_is_where_the_asked_pair_starts() -> None:
    for prompt in NeedleTask(context_len=307, hops=2, num_pairs=7).prompts(20):
        start = round(prompt.depth * 307)
        assert prompt.input_ids[start] == KEY
        assert prompt.input_ids[start + 2 : start + 5] == prompt.answer


@pytest.mark.parametrize("hops", [1, 2])
def test_depths_are_spread_over_the_whole_prompt(hops: int) -> None:
    depths = [prompt.depth for prompt in NeedleTask(context_len=512, hops=hops).prompts(500)]
    tenths = [sum(int(depth * 10) == tenth for depth in depths) for tenth in range(10)]
    # 50 are expected in each tenth; 25 is more than 3.5 standard deviations away.
    assert min(tenths) > 25
    assert max(tenths) < 75


def test_a_seed_fixes_the_prompts_whatever_the_global_generators_do() -> None:
    task = NeedleTask(context_len=256, num_pairs=5)
    torch.manual_seed(1)
    first = task.prompts(3, seed=11)
    torch.manual_seed(2)
    assert task.prompts(5, seed=11)[:3] == first
    assert task.prompts(3, seed=12) != first
    assert task.prompts(3, seed=-11) != first
    assert len({prompt.input_ids for prompt in first}) == 3


def test_one_hop_and_two_hop_prompts_of_a_seed_differ_in_the_question_only() -> None:
    one, two = (NeedleTask(context_len=256, hops=hops).prompts(3, seed=4) for hops in (1, 2))
    for easy, hard in zip(one, two, strict=True):
        assert easy.input_ids[:-2] == hard.input_ids[:-2]
        assert easy.answer == hard.answer
        assert easy.depth == hard.depth


def test_a_prompt_without_filler_is_the_shortest() -> None:
    task = NeedleTask(context_len=1 + 5 * 9 + 2, num_pairs=5)
    assert task.min_context_len == task.context_len == 48
    prompt = task.prompts(1)[0]
    assert len(prompt.input_ids) == 48
    assert solve(prompt) == prompt.answer


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hops": 3}, r"hops.*\(1, 2\).*3"),
        ({"num_pairs": 0}, "num_pairs.*1.*0"),
        ({"num_pairs": 26}, "num_pairs must be at most 25.*26"),
        ({"context_len": "long"}, "context_len.*int"),
        ({"context_len": 146}, "context_len must be at least 147 tokens.*146.*lower num_pairs"),
    ],
)
def test_bad_values_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        NeedleTask(**arguments)


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ValueError, match="count must be at least 0, got -1"):
        NeedleTask().prompts(-1)


@pytest.mark.parametrize(
    ("generated", "expected"),
    [([7, 8, 9], True), ([7, 8, 9, 2, 1], True), ([7, 8], False), ([7, 9, 8], False), ([], False)],
)
def test_exact_match_reads_as_many_tokens_as_the_answer_has(
    generated: list[int], expected: bool
) -> None:
    assert exact_match(generated, (7, 8, 9)) is expected


def test_the_tokenizer_writes_prompts_as_text_and_back() -> None:
    tokenizer = load_tokenizer()
    text = "<bos> f12 KEY s17 s4 s88 s9 <end> f87 LINK s50 s17 QUERY2 s50"
    ids = tokenizer(text).input_ids
    assert ids == [1, 20, 3, 113, 100, 184, 105, 2, 95, 4, 146, 113, 6, 146]
    assert tokenizer.decode(ids) == text
    assert tokenizer("KEY KEY nonsense").input_ids == [3, 3, 7]
    batch = tokenizer(["f0 f1", "f2"], padding=True)
    assert batch.input_ids == [[8, 9], [0, 10]]


def test_prompts_are_half_and_half() -> None:
    prompts = needle_prompts(67, count=7, seed=3)
    assert [prompt.hops for prompt in prompts] == [1] * 4 + [2] * 3
    assert {len(prompt.input_ids) for prompt in prompts} == {67}
    assert prompts != needle_prompts(67, count=7, seed=4)


def test_a_file_of_questions_has_the_prompts_tokens(tmp_path: Path) -> None:
    prompts = needle_prompts(96, count=3)
    found = Files(write_questions(tmp_path / "asked.jsonl", prompts)).questions(
        load_tokenizer(), 96, 9
    )
    assert [each.document_ids + each.question_ids for each in found] == [
        prompt.input_ids for prompt in prompts
    ]
    assert [each.answer_ids for each in found] == [prompt.answer for prompt in prompts]


@pytest.mark.parametrize("hops", [1, 2])
def test_the_model_answers_and_stops(hops: int) -> None:
    model = load_model()
    prompts = NeedleTask(context_len=512, hops=hops).prompts(40, seed=5)
    ids = torch.tensor([prompt.input_ids for prompt in prompts])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6)
    generated = output[:, 512:].tolist()
    right = [
        exact_match(tokens, prompt.answer) and tokens[3] == END
        for tokens, prompt in zip(generated, prompts, strict=True)
    ]
    assert sum(right) >= 38
