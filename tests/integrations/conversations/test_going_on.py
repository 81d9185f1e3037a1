"""Conversations that are saved, interrupted, refused, or answered in other ways."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, TextStreamer

from kvpolicy.errors import CacheInUseError, UnsupportedGenerationError, UnsupportedModelError
from kvpolicy.integrations.transformers import Conversation, PolicyCache, RereadingWarning
from kvpolicy.policies import FastKV, FullContext, SnapKV
from kvpolicy.policy import CachePolicy
from tests.integrations.hybrids.models import hybrid
from tests.integrations.lm_eval.support import char_tokenizer

from .support import LLAMA3, QWEN3, chat_model, chatter, saying, script

POLICY = SnapKV(0.4, window_size=4)
QUESTIONS = ["the quick brown fox", "and the lazy dog?", "which river, which castle?"]


def answer(tokenizer: Any, text: str = "so the fox____.") -> dict[str, Any]:
    return saying([*script(tokenizer, text), tokenizer.eos_token_id])


def state(conversation: Conversation) -> list[Any]:
    """All that a conversation goes on from."""
    layers = conversation.cache.layers
    return [
        str(conversation),
        json.dumps([conversation.messages, conversation._added]),
        conversation._reading.ids,
        [(each.positions.tolist(), each.keys.tolist()) for each in layers if each.kept_len],
    ]


@pytest.mark.parametrize("ends", [False, True], ids=["cut", "ended"])
@pytest.mark.parametrize("policy", [POLICY, FastKV(window_size=4, retention_rate=0.2)], ids=str)
def test_a_saved_conversation_goes_on(
    llama: PreTrainedModel, tmp_path: Path, policy: CachePolicy, *, ends: bool
) -> None:
    """Also one whose cache lacks the last token of an answer."""
    tokenizer, path = chatter(QWEN3), tmp_path / "chat.safetensors"
    conversation = Conversation(llama, tokenizer, policy, template_options={"other": 3})
    for question in QUESTIONS[:2]:
        said = script(tokenizer, "so the fox____.")
        conversation.ask(question, **saying([*said, tokenizer.eos_token_id] if ends else said))
    conversation.add_document("the river")
    conversation.save(path)
    loaded = Conversation.load(path, llama, tokenizer)
    assert state(loaded) == state(conversation)
    assert loaded._template.options == {"other": 3}
    said = conversation.ask(QUESTIONS[2], **answer(tokenizer))
    assert loaded.ask(QUESTIONS[2], **answer(tokenizer)) == said
    assert state(loaded)[:3] == state(conversation)[:3]
    for own, other in zip(loaded.cache.layers, conversation.cache.layers, strict=True):
        torch.testing.assert_close(own.keys, other.keys)
    assert loaded.rereadings == 0
    assert PolicyCache.load(path).policy == policy  # the file is that of the cache, too
    loaded.fork().save(path)
    assert state(Conversation.load(path, llama, tokenizer)) == state(loaded)


def test_files_and_models_that_do_not_fit(llama: PreTrainedModel, tmp_path: Path) -> None:
    tokenizer, path = chatter(), tmp_path / "chat.safetensors"
    conversation = Conversation(llama, tokenizer, POLICY)
    with pytest.raises(ValueError, match="conversation must have an answer to be saved"):
        conversation.save(path)
    conversation.ask(QUESTIONS[0], **answer(tokenizer))
    conversation.cache.save(path)
    with pytest.raises(ValueError, match=r"must be a file of Conversation\.save, .* only a cache"):
        Conversation.load(path, llama, tokenizer)
    conversation.save(path)
    with pytest.raises(ValueError, match="model must be the one that filled the saved cache"):
        Conversation.load(path, chat_model("llama", seed=2), tokenizer)
    other = chatter()
    other.add_tokens(["fox"])
    with pytest.raises(ValueError, match="tokenizer must be the one of the saved conversation"):
        Conversation.load(path, llama, other)
    with pytest.raises(ValueError, match="policy must be the one that filled"):
        Conversation.load(path, llama, tokenizer, FullContext())
    other = chatter(LLAMA3)  # of the same words, so that the text says whether it goes on
    loaded = Conversation.load(path, llama, other)
    with pytest.warns(RereadingWarning):
        loaded.ask(QUESTIONS[1], **answer(other))
    conversation.messages[0]["content"] = torch.ones(2)
    with pytest.raises(TypeError, match="messages must consist of texts, numbers"):
        conversation.save(path)
    tools = {"tools": [len]}
    conversation = Conversation(llama, tokenizer, POLICY)
    conversation.ask(QUESTIONS[0], **answer(tokenizer))
    conversation._template.options.update(tools)
    with pytest.raises(TypeError, match="template_options .*; make tools with .*get_json_schema"):
        conversation.save(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version must be 1, got 2"),
        ({"unread": "many"}, "invalid literal"),
        ({"messages": [{"content": "no role"}]}, "role"),
        ({"messages": 3}, "messages must be a list, got 3"),
        ({"template_options": 3}, "template_options must be a dict, got 3"),
        ({"rereadings": "3"}, "rereadings must be a int, got '3'"),
        ({"text": None}, "text must be a str, got None"),
        (None, "Expecting value"),
    ],
    ids=str,
)
def test_damaged_files(
    llama: PreTrainedModel, tmp_path: Path, change: dict[str, Any] | None, message: str
) -> None:
    tokenizer, path = chatter(), tmp_path / "chat.safetensors"
    conversation = Conversation(llama, tokenizer, POLICY)
    conversation.ask(QUESTIONS[0], **answer(tokenizer))
    conversation.save(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    packed = "" if change is None else json.dumps(json.loads(metadata["conversation"]) | change)
    save_file(load_file(path), path, {**metadata, "conversation": packed})
    with pytest.raises(ValueError, match=rf"must be a whole file of Conversation\.save.*{message}"):
        Conversation.load(path, llama, tokenizer)


class Breaking:
    """A streamer that breaks after some tokens."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.steps = error, 0

    def put(self, value: torch.Tensor) -> None:
        self.steps += 1
        if self.steps == 4:
            raise self.error

    def end(self) -> None:
        raise AssertionError


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("broken pipe")], ids=repr)
@pytest.mark.parametrize("turns", [0, 1])
def test_a_failure_leaves_it_as_it_was(
    llama: PreTrainedModel, error: BaseException, turns: int
) -> None:
    tokenizer = chatter(QWEN3)
    conversation = Conversation(llama, tokenizer, POLICY)
    for question in QUESTIONS[:turns]:
        conversation.ask(question, **answer(tokenizer))
    conversation.add_document("the river")
    spared, before = conversation.fork(), state(conversation)
    with pytest.raises(type(error)):
        conversation.ask(QUESTIONS[2], **answer(tokenizer), streamer=Breaking(error))
    assert state(conversation) == before
    said = conversation.ask(QUESTIONS[2], **answer(tokenizer))
    assert spared.ask(QUESTIONS[2], **answer(tokenizer)) == said
    assert state(conversation) == state(spared)


def test_a_warning_that_is_an_error_leaves_it_as_it_was(llama: PreTrainedModel) -> None:
    tokenizer = chatter()
    conversation = Conversation(llama, tokenizer, POLICY, system="the castle")
    conversation.ask(QUESTIONS[0], **answer(tokenizer))
    conversation.messages[0]["content"] = "the garden"
    before = state(conversation)
    with pytest.raises(RereadingWarning):  # as pytest makes errors of warnings
        conversation.ask(QUESTIONS[1], **answer(tokenizer))
    assert state(conversation) == before


def test_streams(llama: PreTrainedModel, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = chatter()
    conversation = Conversation(llama, tokenizer, POLICY)
    for question in QUESTIONS:
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        said = conversation.ask(question, **answer(tokenizer, "so the fox."), streamer=streamer)
        assert capsys.readouterr().out == f"{said}\n" == "so the fox.\n"


def test_another_thread_is_refused(llama: PreTrainedModel) -> None:
    tokenizer = chatter()
    conversation = Conversation(llama, tokenizer, POLICY)
    caught: list[BaseException] = []

    class Asking:
        def put(self, value: torch.Tensor) -> None:
            def ask() -> None:
                for use in (lambda: conversation.ask("and?"), conversation.fork):
                    try:
                        use()
                    except CacheInUseError as error:
                        caught.append(error)

            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()

        def end(self) -> None:
            pass

    said = conversation.ask(QUESTIONS[0], **answer(tokenizer, "so"), streamer=Asking())
    assert said == "so"
    assert len(caught) == 2 * 4
    assert "give every thread a fork()" in str(caught[0])
    assert len(conversation.messages) == 2


def test_beams_are_read_again(llama: PreTrainedModel) -> None:
    """With full context the answers are those of the whole text, whatever row was the best."""
    tokenizer = chatter(LLAMA3)
    conversation, whole = Conversation(llama, tokenizer, FullContext()), []
    arguments: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 6, "eos_token_id": [2]}
    text = "<|begin|>"
    for question in QUESTIONS:
        new = f"{text}<|start|>user\n\n{question}<|end|><|start|>assistant\n\n"
        conversation.ask(question, **arguments, suppress_tokens=[0, 1, 2])
        whole += tokenizer(new, add_special_tokens=False)["input_ids"]
        output = llama.generate(
            torch.tensor([whole]),
            attention_mask=torch.ones(1, len(whole), dtype=torch.int64),
            **arguments,
            suppress_tokens=[0, 1, 2],
            pad_token_id=2,
        )
        whole = output[0].tolist()
        assert list(conversation._reading.ids) == whole
        assert conversation.cache.get_seq_length() == len(whole) - 6
        text = "<|end|>"
    assert conversation.rereadings == 0


def test_bounded_answers(llama: PreTrainedModel) -> None:
    policy = SnapKV(0.5, window_size=4, decoding=SnapKV(window_size=4).decoding_rule(14, every=5))
    tokenizer = chatter()
    conversation = Conversation(llama, tokenizer, policy)
    conversation.ask(QUESTIONS[0], **answer(tokenizer))
    conversation.ask(QUESTIONS[1], **answer(tokenizer))
    assert max(layer.kept_len for layer in conversation.cache.layers) < 14 + 5
    conversation.ask(QUESTIONS[2], **answer(tokenizer))
    assert conversation.rereadings == 0
    with pytest.raises(UnsupportedGenerationError, match="num_beams must be 1 in a conversation"):
        conversation.ask("so?", num_beams=2)


def test_answers_cannot_be_taken_back_from_recurrent_layers() -> None:
    tokenizer, model = char_tokenizer(), hybrid("qwen3_next")
    tokenizer.chat_template = QWEN3
    conversation = Conversation(model, tokenizer, SnapKV(retention_tokens=20, window_size=2))
    for question in QUESTIONS[:2]:
        conversation.ask(question, max_new_tokens=4, suppress_tokens=[0, 1, 2])
    assert conversation.rereadings == 0
    with pytest.raises(UnsupportedGenerationError, match="num_beams must be 1 in a conversation"):
        conversation.ask("so?", num_beams=2)


def test_stop_strings_and_lengths(llama: PreTrainedModel) -> None:
    tokenizer = chatter()
    conversation = Conversation(llama, tokenizer, POLICY)
    said = conversation.ask(QUESTIONS[0], **answer(tokenizer, "so the fox"), stop_strings="the")
    assert said == "so the"
    said = conversation.ask(QUESTIONS[1], **answer(tokenizer, "dog"))
    assert (said, conversation.rereadings) == ("dog", 0)
    before = len(conversation._reading.ids)
    config = GenerationConfig(max_new_tokens=3, return_dict_in_generate=True)
    conversation.ask(QUESTIONS[1], generation_config=config, suppress_tokens=[0, 1, 2])
    said = tokenizer("<|start|>user\nand the lazy dog?<|end|>\n<|start|>assistant\n")["input_ids"]
    # Before it the last answer's end and line; `said` begins with a token of its own.
    assert len(conversation._reading.ids) == before + 2 + len(said) - 1 + 3
    # No length is given, so that 512 tokens are the most.
    llama.generation_config.max_length = 120
    try:
        conversation.ask(QUESTIONS[2], suppress_tokens=[0, 1, 2])
    finally:
        llama.generation_config.max_length = None
    assert len(conversation._reading.ids) == 120


@pytest.mark.parametrize("size", [5, 16])
def test_prompts_in_chunks(llama: PreTrainedModel, size: int) -> None:
    tokenizer = chatter()
    chunked = Conversation(llama, tokenizer, POLICY)
    whole = Conversation(llama, tokenizer, POLICY)
    for question in QUESTIONS:
        chunked.ask(question, **answer(tokenizer), prefill_chunk_size=size)
        whole.ask(question, **answer(tokenizer))
        assert chunked._reading.ids == whole._reading.ids
        for own, other in zip(chunked.cache.layers, whole.cache.layers, strict=True):
            assert torch.equal(own.positions, other.positions)


def test_it_shows_itself(llama: PreTrainedModel) -> None:
    tokenizer = chatter()
    conversation = Conversation(llama, tokenizer, SnapKV(retention_tokens=12))
    name = "Conversation(LlamaForCausalLM, SnapKV(retention_tokens=12))"
    assert repr(conversation) == f"{name}: 0 turns, empty"
    assert conversation.cache.report().total.seen == 0
    conversation.ask(QUESTIONS[0], **answer(tokenizer, "so"))
    seen = conversation.cache.get_seq_length()
    assert repr(conversation) == f"{name}: 1 turn, {seen} tokens read, 14 held by each layer"
    assert conversation.cache.report().total.seen == seen
    conversation.messages[0]["content"] = "else"
    with pytest.warns(RereadingWarning):
        conversation.ask(QUESTIONS[1], **answer(tokenizer, "so"))
    assert repr(conversation).endswith(" held by each layer, reread 1 time")
    assert ": 2 turns, " in repr(conversation)


ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}\n{% endfor %}"
)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": None}, TypeError, r"model must be a torch\.nn\.Module, got NoneType"),
        ({"model": nn.Linear(2, 2)}, UnsupportedModelError, "must take a cache of Transformers"),
        ({"tokenizer": None}, TypeError, "tokenizer must be a tokenizer or processor"),
        ({"tokenizer": "gpt2"}, TypeError, "tokenizer must be .* got 'gpt2'"),
        ({"tokenizer": chatter(None)}, ValueError, "tokenizer must have a chat_template"),
        ({"policy": SnapKV}, TypeError, r"policy must be a CachePolicy, .*; pass SnapKV\(\)"),
        ({"storage": "disk"}, TypeError, "storage must be a Storage"),
        ({"system": " "}, ValueError, "system must be a text that is not blank, got ' '"),
        ({"system": 3}, TypeError, "system must be a str, got 3"),
        (
            {"template_options": 3},
            TypeError,
            "template_options must be a mapping with names as keys, got 3",
        ),
        ({"template_options": {"tokenize": 1}}, ValueError, "must not contain tokenize, .* got 1"),
    ],
    ids=str,
)
def test_bad_conversations(
    llama: PreTrainedModel, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    given = {"model": llama, "tokenizer": chatter(), "policy": POLICY}
    with pytest.raises(error, match=message):
        Conversation(**{**given, **changes})


@pytest.mark.parametrize(
    ("text", "arguments", "error", "message"),
    [
        ("", {}, ValueError, "text must be a text that is not blank, got ''"),
        (" \n", {}, ValueError, "text must be a text that is not blank"),
        (3, {}, TypeError, "text must be a str, got 3"),
        (None, {}, ValueError, "text must be a str if .* no message waits for an answer"),
        ("so?", {"max_new_tokens": 0}, ValueError, "max_new_tokens must be at least 1, got 0"),
        ("so?", {"max_new_tokens": "9"}, TypeError, "max_new_tokens must be an int, got '9'"),
        ("so?", {"num_beams": 0}, ValueError, "num_beams must be at least 1, got 0"),
        ("so?", {"num_beams": 2, "num_return_sequences": 2}, ValueError, "must be 1, got 2"),
        ("so?", {"past_key_values": 3}, ValueError, "must not contain past_key_values, .* got 3"),
        ("so?", {"attention_mask": 3}, ValueError, "generation must not contain attention_mask"),
        ("so?", {"generation_config": 3}, TypeError, "must be a GenerationConfig, got 3"),
        ("so?", {"use_cache": False}, UnsupportedGenerationError, "use_cache must be True"),
    ],
    ids=str,
)
def test_bad_questions(
    llama: PreTrainedModel, text: Any, arguments: Any, error: type[Exception], message: str
) -> None:
    conversation = Conversation(llama, chatter(QWEN3), POLICY)
    calls = list[object]()
    with (
        llama.register_forward_pre_hook(lambda *_: calls.append(1)),
        pytest.raises(error, match=message),
    ):
        conversation.ask(text, **arguments)
    assert not calls  # nothing was computed
    assert repr(conversation).endswith("0 turns, empty")


def test_other_bad_input(llama: PreTrainedModel) -> None:
    conversation = Conversation(llama, chatter(ALTERNATING), POLICY, system="a castle")
    with pytest.raises(ValueError, match=r"messages must be .*'system', 'user'\]: roles must alt"):
        conversation.ask("so?")
    with pytest.raises(ValueError, match="image must be read by a processor"):
        conversation.add_image(object())
    with pytest.raises(ValueError, match="text must be a text that is not blank, got ''"):
        conversation.add_document("")
    tokenizer = chatter()
    tokenizer.add_tokens(["unheard"])
    conversation = Conversation(llama, tokenizer, POLICY)
    with pytest.raises(
        ValueError, match="tokenizer must be the model's, which has 320 tokens, got .*320"
    ):
        conversation.ask("unheard of")
    conversation.add_document("a river")
    with pytest.raises(ValueError, match="documents or images were added, .* got None"):
        conversation.ask(None)
