"""A document read once: answers are those of a loop by hand, and do not see each other."""

import pytest
import torch

from kvpolicy.integrations.transformers import PolicyCache, ReadDocument
from kvpolicy.integrations.transformers.document import prompt_ids
from kvpolicy.policies import FastKV, FullContext, GemFilter, SnapKV
from kvpolicy.policy import CachePolicy
from tests.integrations.lm_eval.support import char_tokenizer
from tests.integrations.lm_eval.test_later import by_hand
from tests.reference import tiny_model

DOCUMENT = "it was a dark night, and the rain fell in torrents; the street lamps were dim."
QUESTIONS = [" who?", " what fell in the night?", " where"]
POLICIES = [
    FullContext(),
    SnapKV(0.2, window_size=4),
    FastKV(retention_rate=0.2, tsp_rate=0.5, window_size=4),
    GemFilter(retention_rate=0.5),
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_answers_are_those_of_each_question_alone(policy: CachePolicy) -> None:
    tokenizer = char_tokenizer()
    document = ReadDocument(tiny_model("llama", seed=1), tokenizer, DOCUMENT, policy)
    held = str(document.cache.report())
    wanted = [
        tokenizer.decode(by_hand(DOCUMENT, question, policy, 5), skip_special_tokens=True)
        for question in QUESTIONS
    ]
    assert document.answer(QUESTIONS, max_new_tokens=5) == wanted
    assert document.answer(QUESTIONS[::-1], batch_size=2, max_new_tokens=5) == wanted[::-1]
    assert str(document.cache.report()) == held  # questions are appended to copies
    assert document.answer([]) == []


def test_in_a_chat_it_is_the_templated_text() -> None:
    model, tokenizer = tiny_model("llama", seed=1), char_tokenizer()
    document = ReadDocument(model, tokenizer, DOCUMENT, FullContext(), chat=True)
    message = [{"role": "user", "content": DOCUMENT + QUESTIONS[1]}]
    whole = tokenizer.apply_chat_template(
        message, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**whole, max_new_tokens=6)[0, whole["input_ids"].shape[1] :]
    wanted = tokenizer.decode(output, skip_special_tokens=True)
    assert document.answer(QUESTIONS, max_new_tokens=6)[1] == wanted
    assert document.cache.get_seq_length() == len("[user]" + DOCUMENT)


def test_appending_a_prompt_in_generate() -> None:
    """The policy does not act on it, and does on the next that is not appended."""
    model, cache = tiny_model("llama", seed=1), PolicyCache(SnapKV(0.25, window_size=4))
    prompt = torch.arange(1, 41)[None]
    with cache.appending():
        output = model.generate(prompt, past_key_values=cache, max_new_tokens=2)
        assert cache.layers[0].kept_len == 10 + 1  # a first prompt is the policy's all the same
        output = model.generate(
            torch.cat([output, prompt[:, :8]], 1), past_key_values=cache, max_new_tokens=2
        )
    assert cache.layers[0].kept_len == 10 + 2 + 8 + 1
    output = model.generate(
        torch.cat([output, prompt[:, :8]], 1), past_key_values=cache, max_new_tokens=1
    )
    assert cache.layers[0].kept_len == (40 + 2 + 8 + 2 + 8) // 4


def test_what_a_tokenizer_puts_behind_a_text_is_left_out() -> None:
    class Sandwich:
        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            own = [ord(each) for each in text]
            return {"input_ids": [1, *own, 2] if add_special_tokens else own}

    assert prompt_ids(Sandwich(), "ab") == [1, 97, 98]
    assert prompt_ids(Sandwich(), "ab", special=False) == [97, 98]


def test_beams_are_those_of_the_whole_prompt() -> None:
    model, tokenizer = tiny_model("llama", seed=1), char_tokenizer()
    document = ReadDocument(model, tokenizer, DOCUMENT, FullContext())
    found = document.answer(QUESTIONS, max_new_tokens=5, num_beams=3)
    for question, answer in zip(QUESTIONS, found, strict=True):
        whole = tokenizer(DOCUMENT + question, return_tensors="pt")
        output = model.generate(**whole, max_new_tokens=5, num_beams=3)[0, -5:]
        assert answer == tokenizer.decode(output, skip_special_tokens=True)
    with pytest.raises(ValueError, match="num_return_sequences must be 1, got 2"):
        document.answer(QUESTIONS, num_beams=3, num_return_sequences=2)


def test_bad_input() -> None:
    model, tokenizer = tiny_model("llama", seed=1), char_tokenizer()
    with pytest.raises(ValueError, match="document must be a text that is not blank"):
        ReadDocument(model, tokenizer, " \n", FullContext())
    with pytest.raises(TypeError, match="document must be"):
        ReadDocument(model, tokenizer, None, FullContext())  # type: ignore[arg-type]
    document = ReadDocument(model, tokenizer, DOCUMENT, FullContext())
    with pytest.raises(TypeError, match="questions must be a sequence of texts"):
        document.answer("who?")
    with pytest.raises(ValueError, match="questions must not be empty"):
        document.answer([""])
    tokenizer.chat_template = "{{ messages[0]['content'] | upper }}"
    with pytest.raises(ValueError, match="chat template must begin with the document"):
        ReadDocument(model, tokenizer, DOCUMENT, FullContext(), chat=True)
