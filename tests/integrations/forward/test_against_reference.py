"""PolicyCache inside `generate` against the slow reference, which sees one row at a time."""

from functools import cache
from typing import Any

import pytest
from transformers import PreTrainedModel

from kvpolicy import CachePolicy
from tests.integrations.forward.test_gapless import METHODS as GAPLESS
from tests.integrations.forward.test_history import POLICIES as LOOKING_BACK
from tests.integrations.forward.test_together import METHODS as TOGETHER
from tests.integrations.support.conversation import (
    FIRST_LENS,
    METHODS,
    TOLERANCE,
    assert_as_reference,
    run_conversation,
)
from tests.reference import FAMILIES, GaplessState, ReferenceState, TogetherState, tiny_model

ALL_ROWS = tuple(range(len(FIRST_LENS)))
CASES: dict[str, tuple[CachePolicy, Any, type[ReferenceState]]] = {
    **{name: (*pair, ReferenceState) for name, pair in {**METHODS, **LOOKING_BACK}.items()},
    **{f"gapless_{name}": (*pair, GaplessState) for name, pair in GAPLESS.items()},
    **{f"together_{name}": (*pair, TogetherState) for name, pair in TOGETHER.items()},
}
IN_ALL_FAMILIES = {*METHODS, "together_threshold", "together_kvzip", "together_replaykv"}
EAGER = (
    "full_context",
    "streamingllm",
    "snapkv",
    "fastkv",
    "gapless_snapkv",
    "gapless_streamingllm",
)


@cache
def model_of(family: str, implementation: str = "sdpa") -> PreTrainedModel:
    return tiny_model(family, seed=3, attn_implementation=implementation)


@pytest.mark.parametrize("rows", [(0,), ALL_ROWS], ids=["single", "padded"])
@pytest.mark.parametrize(
    ("family", "name"),
    [
        (family, name)
        for name in CASES
        for family in (FAMILIES if name in IN_ALL_FAMILIES else ("llama", "qwen3"))
    ],
)
def test_two_turns(family: str, name: str, rows: tuple[int, ...]) -> None:
    policy, method, state_class = CASES[name]
    assert_as_reference(model_of(family), policy, method, rows, state_class=state_class)


@pytest.mark.parametrize("rows", [(1,), ALL_ROWS], ids=["single", "padded"])
@pytest.mark.parametrize("name", [*EAGER, *sorted(IN_ALL_FAMILIES - METHODS.keys())])
def test_eager_attention(rows: tuple[int, ...], name: str) -> None:
    policy, method, state_class = CASES[name]
    assert_as_reference(model_of("llama", "eager"), policy, method, rows, state_class=state_class)


@pytest.mark.parametrize("name", ["snapkv", "fastkv", "streamingllm"])
def test_the_methods_evict_what_matters(name: str) -> None:
    """The tests above could not pass with the full context in the place of the method."""
    policy, _ = METHODS[name]
    _, turns = run_conversation(model_of("llama"), policy, rows=(0,))
    _, full = run_conversation(model_of("llama"), METHODS["full_context"][0], rows=(0,))
    assert (turns[0].logits - full[0].logits)[:, 1:].abs().max() > 100 * TOLERANCE
