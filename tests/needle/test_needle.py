"""The needle task: what a prompt holds, and that the model answers it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.needle import (
    BOS,
    END,
    KEY,
    LINK,
    QUERY,
    QUERY2,
    SYMBOLS,
    NeedlePrompt,
    NeedleTask,
    load_model,
    load_tokenizer,
    needle_prompts,
)


def solve(prompt: NeedlePrompt) -> tuple[int, ...]:
    """Answer by reading: collect the pairs and links from left to right, then look up."""
    ids, pairs, links = prompt.input_ids, {}, {}
    for index, token in enumerate(ids):
        if token == KEY:
            stop = ids.index(END, index)
            pairs[ids[index + 1]] = ids[index + 2 : stop]
        elif token == LINK:
            links[ids[index + 1]] = ids[index + 2]
    assert sorted(links.values()) == sorted(pairs)
    symbols = [*links, *pairs, *(value for values in pairs.values() for value in values)]
    assert len(set(symbols)) == len(symbols) == len(pairs) * 5
    assert set(symbols) <= set(SYMBOLS)
    kind, name = ids[-2:]
    return pairs[name] if kind == QUERY else pairs[links[name]]


@given(
    context_len=st.integers(240, 400),
    hops=st.sampled_from([1, 2]),
    num_pairs=st.integers(1, 25),
    seed=st.integers(),
)
def test_a_reader_finds_the_only_answer_in_a_prompt_of_exact_length(
    context_len: int, hops: int, num_pairs: int, seed: int
) -> None:
    """A seed fixes the prompts; those of one hop and of two differ in the question only."""
    task = NeedleTask(context_len, hops, num_pairs)
    prompts = task.prompts(2, seed)
    assert task.prompts(3, seed)[:2] == prompts
    assert task.prompts(2, seed + 1) != prompts
    others = NeedleTask(context_len, 3 - hops, num_pairs).prompts(2, seed)
    for prompt, other in zip(prompts, others, strict=True):
        assert len(prompt.input_ids) == context_len
        assert prompt.input_ids.count(KEY) == num_pairs
        assert prompt.input_ids[0] == BOS
        assert prompt.input_ids[-2] == (QUERY, QUERY2)[hops - 1]
        assert solve(prompt) == prompt.answer == other.answer
        assert prompt.input_ids[:-2] == other.input_ids[:-2]


def test_needles_are_spread_over_the_whole_prompt() -> None:
    prompts = NeedleTask(context_len=512).prompts(500)
    depths = [each.input_ids.index(each.answer[0]) / 512 for each in prompts]
    tenths = [sum(int(depth * 10) == tenth for depth in depths) for tenth in range(10)]
    # 50 are expected in each tenth; 25 is more than 3.5 standard deviations away.
    assert min(tenths) > 25
    assert max(tenths) < 75


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
    assert [prompt.input_ids[-2] for prompt in prompts] == [QUERY] * 4 + [QUERY2] * 3


@pytest.mark.parametrize("hops", [1, 2])
def test_the_model_answers_and_stops(hops: int) -> None:
    prompts = NeedleTask(context_len=512, hops=hops).prompts(40, seed=5)
    ids = torch.tensor([prompt.input_ids for prompt in prompts])
    output = load_model().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6)
    pairs = zip(output[:, 512:516].tolist(), prompts, strict=True)
    assert sum(found == [*prompt.answer, END] for found, prompt in pairs) >= 38
