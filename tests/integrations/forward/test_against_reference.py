"""PolicyCache inside `generate` against the slow reference, which sees one row at a time."""

from functools import cache

import pytest
from transformers import PreTrainedModel

from tests.integrations.support.conversation import (
    FIRST_LENS,
    METHODS,
    TOLERANCE,
    assert_same,
    expected_turns,
    run_conversation,
)
from tests.reference import FAMILIES, tiny_model

ALL_ROWS = tuple(range(len(FIRST_LENS)))


@cache
def model_of(family: str, implementation: str = "sdpa") -> PreTrainedModel:
    return tiny_model(family, seed=3, attn_implementation=implementation)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_single_prompt_over_two_turns(family: str, name: str) -> None:
    policy, method = METHODS[name]
    model = model_of(family)
    _, turns = run_conversation(model, policy, rows=(0,))
    for turn, expected in zip(turns, expected_turns(model, method, 0), strict=True):
        assert_same(turn, 0, expected)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_padded_batch_over_two_turns(family: str, name: str) -> None:
    policy, method = METHODS[name]
    model = model_of(family)
    _, turns = run_conversation(model, policy, rows=ALL_ROWS)
    for row in ALL_ROWS:
        for turn, expected in zip(turns, expected_turns(model, method, row), strict=True):
            assert_same(turn, row, expected)


@pytest.mark.parametrize("name", ["full_context", "streamingllm", "snapkv", "fastkv"])
@pytest.mark.parametrize("rows", [(0,), ALL_ROWS], ids=["single", "padded"])
def test_eager_attention(rows: tuple[int, ...], name: str) -> None:
    policy, method = METHODS[name]
    _, turns = run_conversation(model_of("llama", "eager"), policy, rows=rows)
    for index, row in enumerate(rows):
        expected_row = expected_turns(model_of("llama"), method, row)
        for turn, expected in zip(turns, expected_row, strict=True):
            assert_same(turn, index, expected)


@pytest.mark.parametrize("name", ["snapkv", "fastkv", "streamingllm"])
def test_the_methods_evict_what_matters(name: str) -> None:
    """The tests above could not pass with the full context in the place of the method."""
    policy, _ = METHODS[name]
    _, turns = run_conversation(model_of("llama"), policy, rows=(0,))
    _, full = run_conversation(model_of("llama"), METHODS["full_context"][0], rows=(0,))
    assert (turns[0].logits - full[0].logits)[:, 1:].abs().max() > 100 * TOLERANCE
