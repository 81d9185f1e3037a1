"""A conversation under a policy, in which the model reads every turn only once."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvpolicy.checks import check_count, check_kind
from kvpolicy.errors import CacheInUseError
from kvpolicy.integrations.transformers.cache import PolicyCache
from kvpolicy.integrations.transformers.chat.reading import (
    ChatReading,
    Mark,
)
from kvpolicy.integrations.transformers.chat.saving import SavedChat
from kvpolicy.integrations.transformers.chat.template import (
    ChatTemplate,
    Message,
    copy_of,
    images_of,
)
from kvpolicy.integrations.transformers.chat.turn import (
    ChatTurn,
    check_beams,
    check_known,
    complete,
)
from kvpolicy.integrations.transformers.document import check_options
from kvpolicy.integrations.transformers.state.report import CacheReport, held_in_words
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
    text differently. If the template changes the last answer or its beginning, as templates of
    thinking models do, only this answer is read again. The whole conversation is read again, in one
    turn and with a `RereadingWarning`, if earlier text changes, because of the template or of your
    changes to ``messages``, or if images are added after the first turn.

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
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self.messages: list[Message] = []
        self.rereadings = 0
        if system is not None:
            content = self._template.content_of([_text_part("system", system)])
            self.messages.append({"role": "system", "content": content})

    @property
    def cache(self) -> PolicyCache:
        """The cache with all that was read; for calls of your own, use a copy of it."""
        return self._reading.cache

    @property
    def policy(self) -> CachePolicy:
        """The policy that chooses which tokens are kept."""
        return self.cache.policy

    def __repr__(self) -> str:
        turns = sum(message.get("role") == "assistant" for message in self.messages)
        held = held_in_words(self.cache.layers, self.cache.get_seq_length())
        said = [f"{turns} turn{'' if turns == 1 else 's'}", held]
        if self.rereadings:
            said.append(f"reread {self.rereadings} time{'' if self.rereadings == 1 else 's'}")
        name = f"{type(self).__name__}({type(self._model).__name__}, {self.policy})"
        return f"{name}: {', '.join(said)}"

    def report(self) -> CacheReport:
        """Report how many tokens and bytes are held, next to those of a full cache."""
        return self.cache.report()

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
            check_beams(self._model, self.cache, generation)
            config = complete(self._model, self._template.tokenizer, generation)
            turn, anew = self._turn(messages)
            if anew:
                change = self._reading.change(turn.text, turn.images)
                warnings.warn(
                    f"the conversation is read again from its start, {len(turn.ids)} tokens: "
                    f"{change}",
                    RereadingWarning,
                    stacklevel=2,
                )
            answer = turn.answer(self._model, config, generation)
            reading = turn.answered(self._model, self._template, answer, config.num_beams)
            message = self._template.message_of(answer, config.eos_token_id)
            # Nothing before has changed the conversation, and nothing from here on fails.
            self._reading, self._added = reading, []
            self.messages[:] = [*messages, message]
            self.rereadings += anew
        return self._template.decode(answer, special=False)

    def _said(self, text: str | None) -> list[Message]:
        """Return the user's new message as a list; empty if ``text`` is None."""
        if text is not None:
            parts = [*self._added, _text_part("text", text)]
            return [{"role": "user", "content": self._template.content_of(parts)}]
        if self._added or not self.messages or self.messages[-1].get("role") == "assistant":
            raise ValueError(
                "text must be a str if documents or images were added, or if no message waits "
                "for an answer, got None"
            )
        return []

    def _turn(self, messages: list[Message]) -> tuple[ChatTurn, bool]:
        """Return the next turn, and whether the conversation is read again from its start."""
        template, before = self._template, self._reading
        text, images = template.render(messages), images_of(messages)
        start = before.until(text) if before.has_images(images) else None
        anew = start is None
        if start is None:
            before, start = ChatReading(PolicyCache(self.policy, self.cache.storage)), Mark(0, 0)
        if images and not start.ids:
            ids, inputs = template.read_images(messages)
        else:
            ids = [*before.ids[: start.ids], *template.ids(text, start.chars)]
            inputs = before.inputs_for(len(ids))
        check_known(self._model, ids)
        lasting = self._lasting(messages, text, ids, start) or Mark(len(ids), len(text))
        turn = ChatTurn(
            before.copied(start), text, ids, lasting, inputs, tuple(images), before.offsets
        )
        return turn, anew and bool(self._reading.ids)

    def _lasting(
        self, messages: list[Message], text: str, ids: list[int], start: Mark
    ) -> Mark | None:
        """Return the mark up to which later turns repeat the text; None if they repeat all."""
        chars = self._template.lasting(messages, text)
        if not start.chars < chars < len(text):
            return None
        passing = self._template.ids(text, chars)
        count = len(ids) - len(passing)
        return Mark(count, chars) if start.ids < count and ids[count:] == passing else None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other threads from using the conversation in a ``with`` block."""
        if not self._lock.acquire(blocking=False):
            name = None if self._thread is None else self._thread.name
            raise CacheInUseError(
                f"conversation must be used by one thread at a time, but thread {name!r} is using "
                "it; give every thread a fork()"
            )
        self._thread = threading.current_thread()
        try:
            yield
        finally:
            self._thread = None
            self._lock.release()

    def fork(self) -> Conversation:
        """Return an independent copy of the conversation.

        Both share the cache in memory until one of them continues.

        Raises:
            CacheInUseError: The conversation is being used.
        """
        with self._alone():
            fork = object.__new__(type(self))
            fork.__dict__.update(
                self.__dict__,
                messages=copy_of(self.messages),
                _added=list(self._added),
                _lock=threading.Lock(),
                _thread=None,
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
            saved = SavedChat(
                self.messages,
                self._added,
                self._reading,
                self._template.options,
                self._template.fingerprint(),
                self.rereadings,
            )
            self.cache._to_save().write(path, conversation=saved.packed())

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
        saved = SavedChat.read(path, cache)
        made = cls(model, tokenizer, cache.policy, template_options=saved.options, storage=storage)
        if made._template.fingerprint() != saved.vocabulary:
            raise ValueError(
                "tokenizer must be the one of the saved conversation, got one with another "
                f"vocabulary: {tokenizer!r:.80}"
            )
        with cache.attached(model):  # raises an error if another model filled it
            pass
        made.messages, made._added, made._reading = saved.messages, saved.added, saved.reading
        made.rereadings = saved.rereadings
        return made

    def __copy__(self) -> Conversation:
        return self.fork()

    def __deepcopy__(self, memo: dict[int, Any]) -> Conversation:
        return self.fork()  # of the same model


def _text_part(name: str, text: object) -> dict[str, Any]:
    """Return a text as one part of a message's content.

    Raises:
        TypeError: ``text`` is not a str.
        ValueError: ``text`` is blank.
    """
    check_kind(name, text, str)
    assert isinstance(text, str)
    if not text.strip():
        raise ValueError(f"{name} must be a text that is not blank, got {text!r}")
    return {"type": "text", "text": text}
