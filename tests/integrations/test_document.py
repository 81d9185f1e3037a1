"""A document read once: answers are those of a loop by hand, and do not see each other."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers import OffloadedStorage, PolicyCache, ReadDocument
from kvpolicy.integrations.transformers.document import prompt_ids
from kvpolicy.policies import FastKV, FullContext, GemFilter, KVzip, SnapKV
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


@pytest.mark.parametrize("chat", [False, True])
def test_a_document_that_was_saved(chat: bool, tmp_path: Path) -> None:
    """It answers as before, and the model reads no token of it again."""
    model, tokenizer = tiny_model("llama", seed=1), char_tokenizer()
    document = ReadDocument(model, tokenizer, DOCUMENT, SnapKV(0.3, window_size=4), chat=chat)
    wanted = document.answer(QUESTIONS, max_new_tokens=5)
    document.cache.save(tmp_path / "document")
    calls = list[object]()
    with model.register_forward_pre_hook(lambda *_: calls.append(1)):
        cache = PolicyCache.load(tmp_path / "document")
        again = ReadDocument(model, tokenizer, DOCUMENT, cache, chat=chat)
    assert not calls
    assert again.answer(QUESTIONS, max_new_tokens=5) == wanted
    for text, form in ((DOCUMENT, not chat), (DOCUMENT[:-1], chat)):
        with pytest.raises(ValueError, match=r"read this document and no more, .* got a cache of"):
            ReadDocument(model, tokenizer, text, cache, chat=form)
    with pytest.raises(ValueError, match=r"got a cache that has read another token at \d+"):
        ReadDocument(model, tokenizer, DOCUMENT.replace("rain", "snow"), cache, chat=chat)
    with pytest.raises(ValueError, match=r"got a cache of 0 rows and 0 tokens"):
        ReadDocument(model, tokenizer, DOCUMENT, PolicyCache(SnapKV(0.3)), chat=chat)
    with pytest.raises(ValueError, match="storage must be left out with a cache"):
        ReadDocument(model, tokenizer, DOCUMENT, cache, chat=chat, storage=OffloadedStorage())


def test_a_model_that_the_default_does_not_suit() -> None:
    tokenizer = char_tokenizer()
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": len(tokenizer)}
    model = GPT2LMHeadModel(GPT2Config(**sizes)).eval()
    with pytest.raises(UnsupportedModelError, match=r"absolute positions.* such as KVzip"):
        ReadDocument(model, tokenizer, DOCUMENT)
    document = ReadDocument(model, tokenizer, DOCUMENT, KVzip(0.3))
    assert len(document.answer(QUESTIONS[:1], max_new_tokens=2)) == 1


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
        output = model.generate(prompt, cache=cache, max_new_tokens=2)
        assert cache.layers[0].kept_len == 10 + 1  # a first prompt is the policy's all the same
        output = model.generate(
            torch.cat([output, prompt[:, :8]], 1), cache=cache, max_new_tokens=2
        )
    assert cache.layers[0].kept_len == 10 + 2 + 8 + 1
    output = model.generate(torch.cat([output, prompt[:, :8]], 1), cache=cache, max_new_tokens=1)
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


def test_beams_and_outputs_of_a_generation_config() -> None:
    """What `generate` is told by a configuration counts as what it is told by name."""
    model, tokenizer = tiny_model("llama", seed=1), char_tokenizer()
    document = ReadDocument(model, tokenizer, DOCUMENT, SnapKV(0.3))
    config = GenerationConfig(num_beams=3, max_new_tokens=5, return_dict_in_generate=True)
    wanted = document.answer(QUESTIONS, num_beams=3, max_new_tokens=5)
    assert document.answer(QUESTIONS, generation_config=config) == wanted


@pytest.fixture(scope="module")
def document() -> ReadDocument:
    return ReadDocument(tiny_model("llama", seed=1), char_tokenizer(), DOCUMENT, SnapKV(0.3))


@pytest.mark.parametrize(
    ("questions", "arguments", "error", "message"),
    [
        (None, {}, TypeError, "questions must be a sequence of texts, got None; pass a list"),
        (3, {}, TypeError, "questions must be a sequence of texts, got 3"),
        ("who?", {}, TypeError, "questions must be a sequence of texts"),
        ([""], {}, ValueError, "questions must not be empty"),
        ({" who?": 1}, {}, TypeError, "questions must be a sequence of texts"),
        ({" who?"}, {}, TypeError, "questions must be a sequence of texts"),
        (b" who?", {}, TypeError, "questions must be a sequence of texts"),
        ([3], {}, TypeError, "questions must be texts, got 3 among them"),
        ([" who?", None], {}, TypeError, "questions must be texts, got None"),
        ([[" who?"]], {}, TypeError, "questions must be texts, got "),
        ([" who?", ""], {"batch_size": 1}, ValueError, "questions must not be empty, got ''"),
        ([" who?"], {"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
        ([" who?"], {"batch_size": True}, TypeError, "batch_size must be an int, got True"),
        ([" who?"], {"num_beams": 0}, ValueError, "num_beams must be at least 1, got 0"),
        ([" who?"], {"num_beams": "2"}, TypeError, "num_beams must be an int, got '2'"),
        ([" who?"], {"generation_config": 3}, TypeError, "must be a GenerationConfig, got 3"),
        ([" who?"], {"past_key_values": 3}, ValueError, "not contain past_key_values, .* got 3"),
        ([" who?"], {"inputs": 3}, ValueError, "generation must not contain inputs"),
        ([" who?"], {"attention_mask": 3}, ValueError, "must not contain attention_mask"),
    ],
    ids=str,
)
def test_bad_questions(
    document: ReadDocument,
    questions: Any,
    arguments: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    wanted, calls = document.answer([" who?"], max_new_tokens=2), list[object]()
    forward = document._model.register_forward_pre_hook(lambda *_: calls.append(1))
    with forward, pytest.raises(error, match=message):
        document.answer(questions, **arguments)
    assert not calls  # nothing was computed
    assert document.answer([" who?"], max_new_tokens=2) == wanted


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": None}, TypeError, r"model must be a torch\.nn\.Module, got NoneType"),
        ({"model": nn.Linear(2, 2)}, UnsupportedModelError, "must take a cache of Transformers"),
        ({"tokenizer": None}, TypeError, "tokenizer must be one of Transformers, got None"),
        ({"tokenizer": "gpt2"}, TypeError, "tokenizer must be one of Transformers, got 'gpt2'"),
        ({"document": 3}, TypeError, "document must be a str, got 3"),
        ({"document": None}, TypeError, "document must be"),
        ({"document": " \n"}, ValueError, "document must be a text that is not blank"),
        ({"policy": SnapKV}, TypeError, r"policy must be a CachePolicy, .*; pass SnapKV\(\)"),
        ({"storage": "disk"}, TypeError, "storage must be a Storage"),
        ({"chat": "yes"}, TypeError, "chat must be a bool, got 'yes'"),
        ({"chat": True}, ValueError, "chat must be False with a tokenizer that has no chat_temp"),
    ],
    ids=str,
)
def test_bad_documents(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    tokenizer = char_tokenizer()
    tokenizer.chat_template = None
    given = {
        "model": tiny_model("llama", seed=1),
        "tokenizer": tokenizer,
        "document": DOCUMENT,
        "policy": SnapKV(0.3),
    }
    with pytest.raises(error, match=message):
        ReadDocument(**{**given, **changes})


def test_a_template_that_changes_the_document() -> None:
    model, tokenizer = tiny_model("llama", seed=1), char_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] | upper }}"
    with pytest.raises(ValueError, match="chat template must begin with the same document"):
        ReadDocument(model, tokenizer, DOCUMENT, FullContext(), chat=True)
