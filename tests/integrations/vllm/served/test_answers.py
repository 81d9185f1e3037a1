"""Answers of a real vLLM from documents are those of kvpolicy's own `generate`."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.integrations.vllm.served.support import (
    LLAMA3,
    NEEDS_VLLM,
    QUESTIONS,
    READ_LEN,
    ROUNDING,
    YARN,
    Written,
    ask,
    check_answers,
    engine,
    sampling,
)

pytestmark = NEEDS_VLLM
SERVED: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama_yarn": {"family": "llama", "rope_parameters": YARN, "names": ("snapkv", "fastkv")},
    "llama_llama3": {"family": "llama", "rope_parameters": LLAMA3, "names": ("snapkv",)},
    "qwen3": {"family": "qwen3", "names": ("snapkv", "fastkv", "keydiff")},
    "mistral": {"family": "mistral", "names": ("snapkv", "fastkv", "keydiff")},
    "llama_bfloat16": {"family": "llama", "dtype": torch.bfloat16, "names": ("snapkv", "gapless")},
    "qwen3_bfloat16": {"family": "qwen3", "dtype": torch.bfloat16, "names": ("snapkv",)},
    "mistral_bfloat16": {"family": "mistral", "dtype": torch.bfloat16, "names": ("snapkv",)},
}


@pytest.fixture(scope="module", params=SERVED)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, Written]]:
    written = Written(tmp_path_factory.mktemp(request.param), **SERVED[request.param])
    with engine(written) as llm:
        yield llm, written


def test_one_at_a_time_together_and_again(served: tuple[Any, Written]) -> None:
    llm, written = served
    asked = [(name, question) for name in written.documents for question in QUESTIONS]
    for each in asked:
        (output,) = ask(llm, written, [each])
        check_answers(written, [each], [output])
    assert llm.llm_engine.reset_prefix_cache()
    check_answers(written, asked, ask(llm, written, asked))  # loaded together
    check_answers(written, asked, ask(llm, written, asked))  # from shared blocks


def test_a_text_beside_documents_is_as_it_was(served: tuple[Any, Written]) -> None:
    llm, written = served
    ids = written.ids[0].tolist()
    name = next(iter(written.documents))
    prompts = [{"prompt_token_ids": ids}, written.documents[name].prompt([5])]
    text, answer = llm.generate(prompts, [sampling(None), sampling(name)], use_tqdm=False)
    if written.model.dtype == torch.float32:
        wanted = written.model.generate(written.ids, max_new_tokens=16, do_sample=False)
        assert list(text.outputs[0].token_ids) == wanted[0, READ_LEN:].tolist()
    check_answers(written, [(name, [5])], [answer])


def test_other_answers_are_told_apart(served: tuple[Any, Written]) -> None:
    """What is allowed for rounding in bfloat16 is far below what a wrong answer changes."""
    _, written = served
    for name in written.documents:
        own = written.wanted(name, QUESTIONS[1])
        assert written.shortfall(name, QUESTIONS[1], own) < ROUNDING
        assert written.shortfall(name, QUESTIONS[1], own[::-1]) > 10 * ROUNDING
        assert written.shortfall(name, QUESTIONS[1], written.wanted(name, QUESTIONS[2])) > 1
