"""Conversations are those of a loop by hand, whose every token the test writes itself."""

import copy
import warnings
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvpolicy.integrations.transformers import Conversation, RereadingWarning
from kvpolicy.policies import AdaKV, FastKV, FullContext, SnapKV, StreamingLLM
from kvpolicy.policy import CachePolicy

from .support import (
    CHATML,
    COUNTING,
    LLAMA3,
    QWEN3,
    SPECIAL,
    ByHand,
    chat_model,
    chatter,
    saying,
    script,
    spaced_tokenizer,
)

POLICIES = [
    FullContext(),
    SnapKV(0.4, window_size=4),
    FastKV(retention_rate=0.3, tsp_rate=0.6, window_size=4),
    StreamingLLM(0.5),
    AdaKV(0.4, window_size=4),
]
QUESTIONS = ["the quick brown fox", "and the lazy dog?", "which river, which castle?"]
# Before the first question, before every question, behind it, and where an answer did not end.
FORMS = {
    "chatml": (CHATML, "", "<|start|>user\n", "<|end|>\n<|start|>assistant\n", "\n"),
    "llama3": (LLAMA3, "<|begin|>", "<|start|>user\n\n", "<|end|><|start|>assistant\n\n", ""),
    "qwen3": (QWEN3, "", "<|start|>user\n", "<|end|>\n<|start|>assistant\n", "\n"),
}


@pytest.fixture(scope="module")
def qwen3() -> PreTrainedModel:
    return chat_model("qwen3")


def assert_same(conversation: Conversation, by_hand: ByHand) -> None:
    """What was said but the end of the answer, and of a policy what is held."""
    ended = by_hand.ids[-1] in SPECIAL
    assert list(conversation._reading.ids) == by_hand.ids[: -1 if ended else None]
    if by_hand.cache is None:
        return
    assert conversation.cache.get_seq_length() == by_hand.cache.get_seq_length()
    for own, other in zip(conversation.cache.layers, by_hand.cache.layers, strict=True):
        assert torch.equal(own.positions, other.positions)
        torch.testing.assert_close(own.keys, other.keys, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("ends", [False, True], ids=["cut", "ended"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_turns_are_those_by_hand(
    llama: PreTrainedModel, qwen3: PreTrainedModel, policy: CachePolicy, form: str, ends: bool
) -> None:
    """The ids of answers stay, though the tokenizer has fewer for their text.

    So does white space around them, which two of the templates strip.
    """
    template, first, before, behind, after = FORMS[form]
    model = llama if form == "llama3" else qwen3
    tokenizer = chatter(template)
    end = tokenizer.eos_token_id
    says = [*script(tokenizer, " so the fox____. "), *([end] if ends else [])]
    conversation = Conversation(model, tokenizer, policy)
    by_hand = ByHand(model, tokenizer, policy)
    new = first
    with warnings.catch_warnings():
        warnings.simplefilter("error", RereadingWarning)
        for question in QUESTIONS:
            answer = conversation.ask(question, **saying(says))
            said = by_hand.ask(new + before + question + behind, says)
            new = after if ends else "<|end|>" + after
            assert answer == tokenizer.decode(said, skip_special_tokens=True)
            assert_same(conversation, by_hand)
    assert conversation.rereadings == 0
    assert [each["role"] for each in conversation.messages] == ["user", "assistant"] * 3
    text = conversation._reading.text + conversation._reading.answer
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert whole != list(conversation._reading.ids)


@pytest.mark.parametrize("thinks", [True, False], ids=["thoughts", "lead"])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_what_a_template_leaves_out_later_is_read_anew_and_said(
    llama: PreTrainedModel, policy: CachePolicy, *, thinks: bool
) -> None:
    """Thoughts, and what the template begins an answer with."""
    tokenizer = chatter(QWEN3)
    options = {"enable_thinking": thinks}
    conversation = Conversation(llama, tokenizer, policy, template_options=options)
    said = "<think>a river</think>so it is" if thinks else "so it is"
    says = [*script(tokenizer, said), tokenizer.eos_token_id]
    lead = "" if thinks else "<think></think>\n"
    text = ""
    for turn, question in enumerate(QUESTIONS):
        by_hand = ByHand(llama, tokenizer, policy)
        text += f"<|start|>user\n{question}<|end|>\n<|start|>assistant\n"
        if turn:
            with pytest.warns(
                RereadingWarning, match=r"character \d+ on, from '<think>.* to 'so it"
            ):
                conversation.ask(question, **saying(says))
        else:
            conversation.ask(question, **saying(says))
        by_hand.ask(text + lead, says)
        assert_same(conversation, by_hand)
        assert conversation.rereadings == turn
        text += "so it is<|end|>\n"


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_beginning_that_changes_is_read_anew_and_said(
    llama: PreTrainedModel, policy: CachePolicy
) -> None:
    tokenizer = chatter(COUNTING)
    conversation = Conversation(llama, tokenizer, policy)
    says = [*script(tokenizer, "so it_"), tokenizer.eos_token_id]
    text = ""
    for turn, question in enumerate(QUESTIONS):
        by_hand = ByHand(llama, tokenizer, policy)
        text += f"<|start|>user\n{question}<|end|>\n"
        new = f"{2 * turn + 1} messages\n{text}<|start|>assistant\n"
        if turn:
            said = "read again from its start, .* from character 0 on, from '1 mess.*' to '3 mess"
            with pytest.warns(RereadingWarning, match=said if turn == 1 else "read again"):
                answer = conversation.ask(question, **saying(says))
        else:
            answer = conversation.ask(question, **saying(says))
        by_hand.ask(new, says)
        assert_same(conversation, by_hand)
        assert conversation.rereadings == turn
        text += f"<|start|>assistant\n{answer}<|end|>\n"


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_messages_may_be_changed(llama: PreTrainedModel, policy: CachePolicy) -> None:
    """Another system message is read anew; a message behind all goes on."""
    tokenizer = chatter()
    conversation = Conversation(llama, tokenizer, policy, system="the castle")
    assert conversation.messages == [{"role": "system", "content": "the castle"}]
    says = [*script(tokenizer, "so it_"), tokenizer.eos_token_id]
    first = conversation.ask(QUESTIONS[0], **saying(says))
    conversation.messages[0]["content"] = "the garden"
    with pytest.warns(RereadingWarning):
        conversation.ask(QUESTIONS[1], **saying(says))
    by_hand = ByHand(llama, tokenizer, policy)
    by_hand.ask(
        f"<|start|>system\nthe garden<|end|>\n<|start|>user\n{QUESTIONS[0]}<|end|>\n"
        f"<|start|>assistant\n{first}<|end|>\n<|start|>user\n{QUESTIONS[1]}<|end|>\n"
        "<|start|>assistant\n",
        says,
    )
    assert_same(conversation, by_hand)
    conversation.messages.append({"role": "tool", "content": "12345"})
    conversation.ask(None, **saying(says))
    by_hand.ask("\n<|start|>tool\n12345<|end|>\n<|start|>assistant\n", says)
    assert_same(conversation, by_hand)
    assert conversation.rereadings == 1


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_documents_stand_before_the_next_question(
    llama: PreTrainedModel, policy: CachePolicy
) -> None:
    tokenizer = chatter()
    conversation, by_hand = Conversation(llama, tokenizer, policy), ByHand(llama, tokenizer, policy)
    says = [*script(tokenizer, "so it_"), tokenizer.eos_token_id]
    conversation.add_document("the river")
    conversation.add_document("the bridge")
    conversation.ask(QUESTIONS[0], **saying(says))
    said = f"the river\n\nthe bridge\n\n{QUESTIONS[0]}"
    by_hand.ask(f"<|start|>user\n{said}<|end|>\n<|start|>assistant\n", says)
    assert_same(conversation, by_hand)
    conversation.ask(QUESTIONS[1], **saying(says))
    by_hand.ask(f"\n<|start|>user\n{QUESTIONS[1]}<|end|>\n<|start|>assistant\n", says)
    assert_same(conversation, by_hand)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_forks_go_on_by_themselves(llama: PreTrainedModel, policy: CachePolicy) -> None:
    tokenizer = chatter()
    says = [*script(tokenizer, "so the fox_"), tokenizer.eos_token_id]

    def conversation(*questions: str) -> Conversation:
        made = Conversation(llama, tokenizer, policy)
        for question in questions:
            made.ask(question, **saying(says))
        return made

    def assert_equal(own: Conversation, other: Conversation) -> None:
        assert own.messages == other.messages
        assert own._reading.ids == other._reading.ids
        for layer, its in zip(own.cache.layers, other.cache.layers, strict=True):
            assert torch.equal(layer.positions, its.positions)
            torch.testing.assert_close(layer.keys, its.keys)

    origin = conversation(QUESTIONS[0])
    origin.add_document("the river")
    forks = [origin.fork(), copy.copy(origin), copy.deepcopy(origin)]
    origin._added.clear()
    for fork, question in zip(forks, QUESTIONS, strict=True):
        fork._added.clear()
        fork.ask(question, **saying(says))
    origin.ask(QUESTIONS[2], **saying(says))
    forks[0].ask(QUESTIONS[1], **saying(says))
    assert_equal(origin, conversation(QUESTIONS[0], QUESTIONS[2]))
    assert_equal(forks[0], conversation(QUESTIONS[0], QUESTIONS[0], QUESTIONS[1]))
    assert_equal(forks[1], conversation(QUESTIONS[0], QUESTIONS[1]))
    assert_equal(forks[2], origin)
    forks[2].messages[0]["content"] = "else"
    assert origin.messages[0]["content"] == QUESTIONS[0]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_an_end_that_the_template_does_not_write_is_never_read(
    llama: PreTrainedModel, policy: CachePolicy
) -> None:
    """Its keys were not computed yet: the template's own end follows the answer."""
    tokenizer = chatter()
    conversation, by_hand = Conversation(llama, tokenizer, policy), ByHand(llama, tokenizer, policy)
    other = tokenizer.bos_token_id
    says = [*script(tokenizer, "so the fox____."), other]
    new = ""
    for question in QUESTIONS:
        conversation.ask(question, **saying(says), eos_token_id=[other, tokenizer.eos_token_id])
        by_hand.ids = by_hand.ids[:-1]
        by_hand.ask(f"{new}<|start|>user\n{question}<|end|>\n<|start|>assistant\n", says)
        assert_same(conversation, by_hand)
        new = "<|end|>\n"
    assert conversation.rereadings == 0


@pytest.mark.parametrize("ends", [False, True], ids=["cut", "ended"])
@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_a_tokenizer_that_marks_spaces(llama: PreTrainedModel, scheme: Any, ends: bool) -> None:
    """The ids are those of the whole text, also where a text by itself begins with a space."""
    tokenizer = spaced_tokenizer(scheme)
    conversation, seen = Conversation(llama, tokenizer, SnapKV(0.5)), 0
    said = tokenizer.convert_tokens_to_ids(["▁the", "▁castle"])
    says = [*said, *([tokenizer.eos_token_id] if ends else [])]
    for question in QUESTIONS:
        before = conversation._reading.ids
        conversation.ask(question, **saying(says))
        ids = conversation._reading.ids
        assert ids[:seen] == before[:seen]
        text = conversation._reading.text
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == list(ids[:-2])
        seen = conversation.cache.get_seq_length()
    assert conversation.rereadings == 0
