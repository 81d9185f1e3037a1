"""A conversation under a policy, in which the model reads every turn only once."""

from __future__ import annotations

import copy
import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs
from torch import Tensor

from kvpolicy.checks import check_count, check_kind
from kvpolicy.errors import CacheInUseError
from kvpolicy.integrations.transformers.cache import PolicyCache
from kvpolicy.integrations.transformers.chat.reading import ChatReading, complete, offsets_of
from kvpolicy.integrations.transformers.chat.saving import packed, unpacked
from kvpolicy.integrations.transformers.chat.template import ChatTemplate, Message, images_of
from kvpolicy.integrations.transformers.document import check_options
from kvpolicy.integrations.transformers.state.report import held_in_words
from kvpolicy.integrations.transformers.state.storage import Storage
from kvpolicy.policy import CachePolicy


class RereadingWarning(UserWarning):
    """Warns that a conversation is read again from its start, since its earlier text changed."""


class Conversation:
    """A conversation with a model under a policy; each turn is read once and kept in the cache.

    In each turn the model reads only the new text. The policy then chooses among the tokens that
    the cache holds and the new ones. The tokenizer's chat template makes the text.

    Args:
        model: A decoder-only model of Transformers.
        tokenizer: Its tokenizer, with a chat template; or its processor, to add images.
        policy: Which tokens to keep.
        system: A system message to begin with; None for none.
        template_options: Options of the chat template, such as ``{"enable_thinking": False}`` or
            ``{"tools": [...]}``.
        storage: How keys and values are held; see `PolicyCache`.

    Attributes:
        messages: The messages so far, as the chat template gets them. You may change them, or add
            others, such as results of tools.
        rereadings: How often the conversation was read again from its start.

    Raises:
        TypeError: An argument has the wrong type.
        UnsupportedModelError: The policy cannot be applied to the model.
        ValueError: There is no chat template, or ``system`` is blank.

    The cache is reused as long as the text of the whole conversation begins with the text that was
    read. The ids of answers stay as they were generated, even if the tokenizer would encode their
    text differently. If earlier text has changed, because the template removes the thoughts of
    answers or because you changed ``messages``, or if images were added after the first turn, then
    the whole conversation is read again, in one turn and with a `RereadingWarning`.

    A call that fails or is interrupted leaves the conversation as it was. During a call, the cache
    from before the call and the new one are both in memory.

    Example:
        >>> from kvpolicy.evaluation import load  # the model SmolLM2-135M-Instruct
        >>> from kvpolicy.policies import SnapKV
        >>> found = load()
        >>> chat = Conversation(found.model, found.tokenizer, SnapKV(retention_tokens=64))
        >>> first = chat.ask("Which is the capital of France?", max_new_tokens=12)
        >>> first
        'The capital of France is Paris.'
        >>> other = chat.fork()
        >>> second = chat.ask("And that of Italy?", max_new_tokens=12)
        >>> second
        'The capital of Italy is Rome.'
        >>> [message["role"] for message in chat.messages]
        ['user', 'assistant', 'user', 'assistant']
        >>> len(other.messages), chat.rereadings
        (2, 0)
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        policy: CachePolicy,
        *,
        system: str | None = None,
        template_options: Mapping[str, Any] | None = None,
        storage: Storage | None = None,
    ) -> None:
        cache = PolicyCache(policy, storage)
        self._template = ChatTemplate(tokenizer, template_options)
        with cache.attached(model):  # raises an error if the policy cannot act on it
            pass
        self._model = model
        self._reading = ChatReading(cache)
        self._added: list[dict[str, Any]] = []
        self._thread = threading.current_thread().name
        self._lock = threading.Lock()
        self.messages: list[Message] = []
        self.rereadings = 0
        if system is not None:
            self.messages.append(self._message("system", [_text_part("system", system)]))

    @property
    def cache(self) -> PolicyCache:
        """The cache with all that was read; for calls of your own, use a copy of it."""
        return self._reading.cache

    def __repr__(self) -> str:
        turns = sum(message.get("role") == "assistant" for message in self.messages)
        held = held_in_words(self.cache.layers, self.cache.get_seq_length())
        said = [f"{turns} turn{'' if turns == 1 else 's'}", held]
        if self.rereadings:
            said.append(f"reread {self.rereadings} time{'' if self.rereadings == 1 else 's'}")
        name = f"{type(self).__name__}({type(self._model).__name__}, {self.cache.policy})"
        return f"{name}: {', '.join(said)}"

    def add_document(self, text: str) -> None:
        """Add a document to the beginning of the next question's message.

        Raises:
            TypeError: ``text`` is not a str.
            ValueError: ``text`` is blank.
        """
        self._added.append(_text_part("text", text))

    def add_image(self, image: Any) -> None:
        """Add an image to the beginning of the next question's message.

        Args:
            image: The image, as the processor takes it: one of PIL, or an array.

        Raises:
            ValueError: The conversation has no processor, but a tokenizer.
        """
        if self._template.processor is None:
            raise ValueError(
                "image must be read by a processor, but the conversation was given a tokenizer; "
                "pass the model's processor in its place"
            )
        self._added.append({"type": "image", "image": image})

    def ask(self, text: str | None, *, max_new_tokens: int | None = None, **generation: Any) -> str:
        """Ask a question, and return the model's answer.

        Args:
            text: The question, or whatever the user says. None asks for an answer to ``messages``
                as they are, for example after a tool's result.
            max_new_tokens: Number of tokens of the longest answer; None for what the generation
                config says, and 512 if it says nothing.
            generation: Other arguments of `generate`, such as ``do_sample`` or ``streamer``, except
                inputs and cache. A streamer is given the whole conversation first, so build it with
                ``skip_prompt=True``.

        Returns:
            The answer, without special tokens.

        Raises:
            TypeError: ``text`` is not a str, or an argument of `generate` has the wrong type.
            CacheInUseError: Another thread uses the conversation.
            ValueError: ``text`` is blank, ``generation`` names an input or the cache, the template
                refuses the messages, or the tokenizer is not the model's.

        Warns:
            RereadingWarning: The conversation is read again from its start.
        """
        with self._alone():
            check_options(generation, "the conversation")
            if max_new_tokens is not None:
                generation["max_new_tokens"] = check_count(
                    "max_new_tokens", max_new_tokens, minimum=1
                )
            messages = [*self.messages, *self._said(text)]
            config = complete(self._model, self._template.tokenizer, self.cache, generation)
            turn, inputs, anew = self._turn(messages)
            answer = turn.answered(self._model, inputs, config, generation)
            ends = config.eos_token_id  # which the template writes itself
            ended = answer[-1] in (ends if isinstance(ends, list) else [ends])
            own = answer[:-1] if ended else answer
            said = self._template.decode(own)
            # Nothing before has changed the conversation, and nothing from here on fails.
            self._reading = attrs.evolve(
                turn, answer=said, ids=(*turn.ids, *own), offsets=offsets_of(self._model)
            )
            self._added = []
            self.messages[:] = [*messages, self._message("assistant", [_part(said)])]
            self.rereadings += anew
        return self._template.decode(answer, special=False)

    def _message(self, role: str, parts: list[dict[str, Any]]) -> Message:
        return {"role": role, "content": self._template.content_of(parts)}

    def _said(self, text: str | None) -> list[Message]:
        """Return the user's new message as a list; empty if ``text`` is None."""
        if text is not None:
            return [self._message("user", [*self._added, _text_part("text", text)])]
        if self._added or not self.messages or self.messages[-1].get("role") == "assistant":
            raise ValueError(
                "text must be a str if documents or images were added, or if no message waits "
                "for an answer, got None"
            )
        return []

    def _turn(self, messages: list[Message]) -> tuple[ChatReading, dict[str, Tensor], bool]:
        """Return the next turn, the model's other inputs for it, and whether all is read anew."""
        before, template = self._reading, self._template
        text, images = template.render(messages), images_of(messages)
        start = before.new_from(text, images)
        if start is not None:
            return before.with_text(text, template.ids(text, start)), {}, False
        ids, inputs = template.read_images(messages) if images else (template.ids(text, 0), {})
        if before.ids:
            warnings.warn(
                f"the conversation is read again from its start, {len(ids)} tokens: "
                f"{before.change(text, images)}",
                RereadingWarning,
                stacklevel=3,
            )
        cache = PolicyCache(self.cache.policy, self.cache.storage)
        turn = ChatReading(cache, text, ids=tuple(ids), images=tuple(images))
        return turn, inputs, bool(before.ids)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other threads from using the conversation in a ``with`` block."""
        if not self._lock.acquire(blocking=False):
            raise CacheInUseError(
                f"conversation must be used by one thread at a time, but thread {self._thread!r} "
                "is using it; give every thread a fork()"
            )
        self._thread = threading.current_thread().name
        try:
            yield
        finally:
            self._lock.release()

    def fork(self) -> Conversation:
        """Return an independent copy of the conversation.

        Both share the cache in memory until one of them continues.

        Raises:
            CacheInUseError: The conversation is being used.
        """
        with self._alone():
            images = {id(each): each for each in images_of(self.messages)}  # are not copied
            fork = object.__new__(type(self))
            fork.__dict__.update(
                self.__dict__,
                messages=copy.deepcopy(self.messages, images),
                _added=list(self._added),
                _lock=threading.Lock(),
            )
            return fork

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the conversation to a file, from which `load` continues later or elsewhere.

        Args:
            path: The file, in the safetensors format of `PolicyCache.save`. It also gets the
                messages and the ids of all tokens. Images must be PIL images.

        Raises:
            TypeError: A message, an image or ``template_options`` cannot be written as JSON.
            CacheInUseError: The conversation is being used.
            ValueError: Nothing was asked yet, or ``path`` does not name a file.
            OSError: See `PolicyCache.save`.
        """
        with self._alone():
            if not self._reading.ids:
                raise ValueError(
                    "conversation must have an answer to be saved, got one that has read nothing"
                )
            text = packed(
                self._reading,
                messages=self.messages,
                added=self._added,
                template_options=self._template.options,
                vocabulary=self._template.fingerprint(),
                rereadings=self.rereadings,
            )
            self.cache._to_save().write(path, conversation=text)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: Any,
        tokenizer: Any,
        policy: CachePolicy | None = None,
        *,
        storage: Storage | None = None,
    ) -> Conversation:
        """Load a conversation from a file written by `save`, to continue it.

        Args:
            path: The file.
            model: The model that read the conversation; see `PolicyCache.load`.
            tokenizer: Its tokenizer or processor. If its chat template has changed and now gives
                another text, the conversation is read again from its start.
            policy: See `PolicyCache.load`.
            storage: How keys and values are held from now on; None holds them unchanged.

        Raises:
            TypeError: An argument has the wrong type.
            OSError: The file cannot be read.
            ValueError: The file was not written by `save` or is damaged, or the model, the policy
                or the tokenizer is a different one.
        """
        cache = PolicyCache.load(path, policy, storage)
        reading, saved = unpacked(path, cache)
        options = saved["template_options"]
        made = cls(model, tokenizer, cache.policy, template_options=options, storage=storage)
        if made._template.fingerprint() != saved["vocabulary"]:
            raise ValueError(
                "tokenizer must be the one of the saved conversation, got one with another "
                f"vocabulary: {tokenizer!r:.80}"
            )
        with cache.attached(model):  # raises an error if another model filled it
            pass
        made.messages, made._added = saved["messages"], saved["added"]
        made._reading, made.rereadings = reading, saved["rereadings"]
        return made

    def __copy__(self) -> Conversation:
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> Conversation:
        return self.fork()  # of the same model


def _text_part(name: str, text: object) -> dict[str, Any]:
    """Return a text as one part of a message's content."""
    check_kind(name, text, str)
    assert isinstance(text, str)
    if not text.strip():
        raise ValueError(f"{name} must be a text that is not blank, got {text!r}")
    return _part(text)


def _part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
