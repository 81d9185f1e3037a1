"""Render prompts as chats, and find the messages' text in the rendered prompt."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

Span = tuple[int, int]
# Messages of these roles are instructions: they are kept whole unless "keep" says otherwise.
KEPT_ROLES = ("system", "developer")


@attrs.frozen
class Message:
    """A chat message, with the texts in it that compression must not cut.

    Args:
        fields: The fields of it that a server gets.
        keeps: Parts of its content that are never cut; None for all of it.
    """

    fields: dict[str, Any]
    keeps: tuple[str, ...] | None = ()

    @property
    def content(self) -> str:
        """The message's text; empty if it has none, as when it only calls tools."""
        return self.fields.get("content") or ""

    @staticmethod
    def read(entry: Any, number: int) -> Message:
        """Parse a chat message from a dict, which may have ``"keep"`` beside the usual fields.

        Args:
            entry: ``{"role": ..., "content": ...}``; ``"keep"`` is True for all of the content,
                False for none, a text or a list of texts of the content. Without it, system
                messages are kept whole.
            number: Which it is, from 1, for messages.

        Raises:
            TypeError: It is no mapping with texts.
            ValueError: A text to keep is not in the content.
        """
        if not isinstance(entry, Mapping) or not isinstance(entry.get("role"), str):
            raise TypeError(
                f'message {number} must be {{"role": "...", "content": "..."}}, got {entry!r:.80}'
            )
        fields = {key: value for key, value in entry.items() if key != "keep"}
        content = fields.get("content")
        if content is not None and not isinstance(content, str):
            raise TypeError(f"content of message {number} must be a text, got {content!r:.80}")
        keep = entry.get("keep", fields["role"] in KEPT_ROLES)
        texts = [keep] if isinstance(keep, str) else keep
        if isinstance(texts, bool):
            return Message(fields, None if texts else ())
        if not isinstance(texts, Sequence) or not all(isinstance(each, str) for each in texts):
            raise TypeError(
                f"keep of message {number} must be true, false, a text or a list of texts, got "
                f"{keep!r:.80}"
            )
        for text in texts:
            if not text or text not in (content or ""):
                raise ValueError(f"keep of message {number} must be in its content, got {text!r}")
        return Message(fields, tuple(texts))


@attrs.frozen
class Rendered:
    """A prompt's text as the model reads it, with the spans of the messages' contents.

    Args:
        text: All of it, the template's words among it.
        contents: Where in it each message's content is, in characters, ascending; without
            what the template strips off. Empty spans for messages without content.
        special: Whether the tokenizer is to add its special tokens; a template has its own.
    """

    text: str
    contents: tuple[Span, ...]
    special: bool = True


def read_messages(entries: Sequence[Any]) -> tuple[Message, ...]:
    """Parse the messages of a chat from a list of dicts.

    Raises:
        TypeError: See `Message.read`.
        ValueError: Likewise; or no message has content.
    """
    messages = tuple(Message.read(entry, i) for i, entry in enumerate(entries, start=1))
    if not any(each.content.strip() for each in messages):
        raise ValueError("prompt must hold at least one message with content, got none")
    return messages


def render(tokenizer: Any, messages: Sequence[Message]) -> Rendered:
    """Render a chat by its tokenizer's template; if it has none, join the contents by line ends.

    Args:
        tokenizer: A tokenizer of Transformers.
        messages: The chat. A reply is asked for unless the last is the assistant's own.

    Raises:
        ValueError: The template does more with contents than to strip white space off their ends.
    """
    contents = [each.content for each in messages]
    if not getattr(tokenizer, "chat_template", None):
        starts = itertools.accumulate((len(each) + 1 for each in contents), initial=0)
        spans = [(at, at + len(each)) for at, each in zip(starts, contents, strict=False)]
        return Rendered("\n".join(contents), tuple(spans))
    # Contents that nobody writes, so that all other text is the template's.
    marks = [f"\ue000{index}\ue001" for index in range(len(contents))]
    marked = [
        {**each.fields, "content": mark} if each.content.strip() else each.fields
        for each, mark in zip(messages, marks, strict=True)
    ]
    skeleton, pieces = _templated(tokenizer, marked), []
    for each, mark in zip(messages, marks, strict=True):
        if not each.content.strip():
            continue
        piece, found, skeleton = skeleton.partition(mark)
        if not found:
            raise _unlocated()
        pieces.append(piece)
    text = _templated(tokenizer, [each.fields for each in messages])
    return _located(text, [*pieces, skeleton], contents)


def _templated(tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    text: str = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=messages[-1]["role"] != "assistant"
    )
    return text


def _located(text: str, pieces: Sequence[str], contents: Sequence[str]) -> Rendered:
    """Find the span of each message's content in the rendered chat."""
    if not text.startswith(pieces[0]):
        raise _unlocated()
    at, following = len(pieces[0]), iter(pieces[1:])
    spans: list[Span] = []
    for content in contents:
        if not content.strip():
            spans.append((at, at))
            continue
        piece = next(following)
        for written in (content, content.strip()):
            end = at + len(written)
            if text.startswith(written, at) and text.startswith(piece, end):
                break
        else:
            raise _unlocated()
        spans.append((at, end))
        at = end + len(piece)
    if at != len(text):
        raise _unlocated()
    return Rendered(text, tuple(spans), special=False)


def _unlocated() -> ValueError:
    return ValueError(
        "prompt must be a chat whose contents the tokenizer's chat template leaves as they are, "
        "but it changes them; give the text as a plain prompt, with chat=False (--no-chat)"
    )
