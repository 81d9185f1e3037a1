"""Exact match, held against answers that a loop without any cache finds."""

import pytest
import torch
from transformers import PreTrainedModel

from kvpolicy.evaluation import Prompt, Score, measure_accuracy
from kvpolicy.evaluation.comparison.accuracy import batches
from kvpolicy.policies import FastKV, FullContext, SnapKV, StreamingLLM
from tests.reference import VOCAB_SIZE, random_tokens, tiny_model

LENGTHS = (41, 59, 41, 53, 41, 59, 41)


def greedy(model: PreTrainedModel, prompt: list[int], count: int) -> tuple[int, ...]:
    """The continuation by full forwards, without a cache."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            logits = model(torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tuple(tokens[len(prompt) :])


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", seed=5)


@pytest.fixture(scope="module")
def prompts(model: PreTrainedModel) -> list[Prompt]:
    """Prompts of mixed length and kind that full context answers."""
    drawn = [random_tokens(seed, length) for seed, length in enumerate(LENGTHS)]
    return [
        Prompt(tuple(tokens), (greedy(model, tokens, 3),), kind="odd" if index % 2 else "even")
        for index, tokens in enumerate(drawn)
    ]


@pytest.mark.parametrize(
    "policy",
    [
        FullContext(),
        SnapKV(retention_rate=1.0),
        FastKV(tsp_layer=0, tsp_rate=1.0, retention_rate=1.0),
    ],
)
def test_policy_that_keeps_everything_answers_everything(
    model: PreTrainedModel, prompts: list[Prompt], policy: FullContext
) -> None:
    assert measure_accuracy(model, prompts, policy) == {"even": Score(4, 4), "odd": Score(3, 3)}


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_wrong_token_is_a_wrong_answer(
    model: PreTrainedModel, prompts: list[Prompt], place: int
) -> None:
    spoilt = []
    for index, prompt in enumerate(prompts):
        answer = list(prompt.answers[0])
        if index in (0, 4, 5):
            answer[place] = (answer[place] + 1) % VOCAB_SIZE
        spoilt.append(Prompt(prompt.input_ids, (tuple(answer),), prompt.kind))
    scores = measure_accuracy(model, spoilt, FullContext())
    assert scores == {"even": Score(2, 4), "odd": Score(2, 3)}


def test_policy_reaches_the_model(model: PreTrainedModel, prompts: list[Prompt]) -> None:
    scores = measure_accuracy(model, prompts, StreamingLLM(retention_tokens=6))
    assert sum(score.matches for score in scores.values()) < len(prompts)


def test_batches_hold_one_length_and_every_prompt_once(prompts: list[Prompt]) -> None:
    found = list(batches(prompts))
    assert [len(batch) for batch in found] == [4, 2, 1]
    assert all(len({len(prompt.input_ids) for prompt in batch}) == 1 for batch in found)
    assert {id(prompt) for batch in found for prompt in batch} == {id(each) for each in prompts}


def test_long_prompts_come_one_by_one() -> None:
    long = [Prompt((1,) * 16384, ((2,),)) for _ in range(3)]
    assert [len(batch) for batch in batches(long)] == [1, 1, 1]


def test_progress_counts_prompts(model: PreTrainedModel, prompts: list[Prompt]) -> None:
    told: list[tuple[str, int, int]] = []
    measure_accuracy(
        model, prompts, FullContext(), stage="s", progress=lambda *each: told.append(each)
    )
    assert told == [("s", 0, 7), ("s", 4, 7), ("s", 6, 7), ("s", 7, 7)]


def test_no_prompts(model: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="at least one prompt"):
        measure_accuracy(model, [], FullContext())


def test_interval_by_hand() -> None:
    low, high = Score(5, 10).interval
    assert (low, high) == (pytest.approx(0.2366, abs=1e-4), pytest.approx(0.7634, abs=1e-4))
    assert Score(0, 10).interval[0] == 0.0
    assert Score(10, 10).interval[1] == pytest.approx(1.0)
