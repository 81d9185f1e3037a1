"""Chats: whose words are the messages' and whose the template's."""

from typing import Any

import pytest

from kvpolicy.evaluation.compression.chat import Message, read_messages, render
from kvpolicy.evaluation.tasks.ruler_words import load_tokenizer
from tests.evaluation.compression.tokenizers import byte_tokenizer

UPPER = "{% for message in messages %}[{{ message.content | upper }}]{% endfor %}"
NAMING = "{% for message in messages %}{{ message.content }}:{{ message.content }}{% endfor %}"


def chat(*contents: Any, role: str = "user") -> list[Message]:
    return [Message({"role": role, "content": content}) for content in contents]


def located(tokenizer: Any, messages: list[Message]) -> tuple[str, list[str]]:
    found = render(tokenizer, messages)
    return found.text, [found.text[start:end] for start, end in found.contents]


def test_contents_are_found_though_the_template_says_the_same() -> None:
    messages = chat("user", "\n", "<|end|>\n", "user\nuser ", "user")
    text, contents = located(byte_tokenizer(), messages)
    assert contents == ["user", "", "<|end|>", "user\nuser", "user"]
    assert text.count("user") == 5 + 4
    starts = [start for start, _ in render(byte_tokenizer(), messages).contents]
    assert starts == sorted(starts)
    assert text[starts[0] - 5 : starts[0]] == "user\n"  # behind the role, not the role


def test_a_reply_is_asked_for_behind_a_user() -> None:
    asked, _ = located(byte_tokenizer(), chat("fox"))
    assert asked.endswith("<|start|>assistant\n")
    begun, _ = located(byte_tokenizer(), [*chat("fox"), *chat("The", role="assistant")])
    assert begun.endswith("The<|end|>\n")


def test_without_a_template_lines_are_joined() -> None:
    text, contents = located(load_tokenizer(), chat("the river", "", "fox"))
    assert text == "the river\n\nfox"
    assert contents == ["the river", "", "fox"]


@pytest.mark.parametrize("template", [UPPER, NAMING])
def test_a_template_that_changes_contents_is_refused(template: str) -> None:
    with pytest.raises(ValueError, match="whose contents the tokenizer's chat template leaves"):
        render(byte_tokenizer(template), chat("fox", "dog"))


def test_what_messages_keep() -> None:
    messages = read_messages(
        [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "a b c", "keep": ["a", "c"]},
            {"role": "user", "content": "a b", "keep": "b"},
            {"role": "system", "content": "x", "keep": False},
            {"role": "assistant", "content": None, "tool_calls": [1]},
            {"role": "user", "content": "y", "keep": True},
        ]
    )
    assert [each.keeps for each in messages] == [None, ("a", "c"), ("b",), (), (), None]
    assert messages[1].fields == {"role": "user", "content": "a b c"}
    assert messages[4].fields["tool_calls"] == [1]


@pytest.mark.parametrize(
    ("entries", "error", "said"),
    [
        ([], ValueError, "at least one message with content"),
        ([{"role": "user", "content": " "}], ValueError, "at least one message with content"),
        (["fox"], TypeError, "message 1 must be"),
        ([{"content": "fox"}], TypeError, "message 1 must be"),
        ([{"role": "user", "content": [{"text": "x"}]}], TypeError, "content of message 1 must be"),
        ([{"role": "user", "content": "x", "keep": 3}], TypeError, "keep of message 1 must be"),
        ([{"role": "user", "content": "x", "keep": "y"}], ValueError, "must be in its content"),
        ([{"role": "user", "content": "x", "keep": ""}], ValueError, "must be in its content"),
    ],
)
def test_bad_messages(entries: list[Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        read_messages(entries)
