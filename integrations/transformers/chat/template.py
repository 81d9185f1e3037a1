"""Turn a conversation into text by its chat template, and encode the new part."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

Message = dict[str, Any]

# Options of `apply_chat_template` that follow from the conversation.
OWN_OPTIONS = {
    "add_generation_prompt",
    "continue_final_message",
    "conversation",
    "return_dict",
    "return_tensors",
    "tokenize",
}
# The fields of a part of a message that say which image it is.
IMAGE_FIELDS = ("image", "url", "path", "base64")


class ChatTemplate:
    """A tokenizer or processor with a chat template, and the template's options.

    Args:
        tokenizer: A tokenizer of Transformers, or a processor around one, which reads images. The
            attributes are the tokenizer in both cases, and the processor, None without one.
        options: Options of the chat template, such as ``{"enable_thinking": False}``.
    """

    def __init__(self, tokenizer: Any, options: Mapping[str, Any] | None) -> None:
        options = {} if options is None else options
        if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
            raise TypeError(
                f"template_options must be a mapping with names as keys, got {options!r}"
            )
        for name in sorted(OWN_OPTIONS & options.keys()):
            raise ValueError(
                f"template_options must not contain {name}, which the conversation sets itself, "
                f"got {options[name]!r}"
            )
        own = getattr(tokenizer, "tokenizer", None)
        if not callable(tokenizer) or not hasattr(tokenizer if own is None else own, "decode"):
            raise TypeError(
                f"tokenizer must be a tokenizer or processor of Transformers, got {tokenizer!r}"
            )
        self.processor = None if own is None else tokenizer
        self.tokenizer: Any = tokenizer if own is None else own
        self._owner = tokenizer if getattr(tokenizer, "chat_template", None) else self.tokenizer
        self.options: dict[str, Any] = dict(options)
        if not getattr(self._owner, "chat_template", None) and "chat_template" not in options:
            raise ValueError(
                "tokenizer must have a chat_template, which says how a model reads turns, got none "
                f"in {type(tokenizer).__name__}; set tokenizer.chat_template, or use PolicyCache "
                "with texts of your own"
            )

    def content_of(self, parts: Sequence[Mapping[str, Any]]) -> Any:
        """Return a message's content: a text, or a list of parts if a processor reads it."""
        if self.processor is not None:
            return [dict(part) for part in parts]
        return "\n\n".join(part["text"] for part in parts)

    def render(self, messages: Sequence[Message]) -> str:
        """Return a conversation as text, by the chat template, with the beginning of an answer."""
        text: str = self._apply([_without_images(each) for each in messages], tokenize=False)
        return text

    def _apply(self, messages: Sequence[Message], **arguments: Any) -> Any:
        from jinja2 import TemplateError

        try:
            return self._owner.apply_chat_template(
                list(messages), add_generation_prompt=True, **arguments, **self.options
            )
        except TemplateError as error:
            roles = [each.get("role") for each in messages]
            raise ValueError(
                "messages must be a conversation that the tokenizer's chat template accepts, got "
                f"the roles {roles}: {error}"
            ) from error

    def ids(self, text: str, start: int) -> list[int]:
        """Return the token ids of a text from a character on.

        They are those of the whole text, where a token begins at the character.
        """
        whole, before = self._encode(text), self._encode(text[:start])
        if whole[: len(before)] == before:
            return whole[len(before) :]
        return self._encode(text[start:])

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def read_images(self, messages: Sequence[Message]) -> tuple[list[int], dict[str, Tensor]]:
        """Return the token ids of a conversation with images, and the model's other inputs."""
        made = self._apply(messages, tokenize=True, return_dict=True, return_tensors="pt")
        others = {name: made[name] for name in made if name not in ("input_ids", "attention_mask")}
        return made["input_ids"][0].tolist(), others

    def decode(self, ids: Sequence[int], *, special: bool = True) -> str:
        """Return the text of an answer, with or without its special tokens."""
        text: str = self.tokenizer.decode(
            list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )
        return text

    def fingerprint(self) -> str:
        """Return a hash of the tokenizer's vocabulary."""
        vocabulary = sorted(self.tokenizer.get_vocab().items())
        return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def images_of(messages: Sequence[Message]) -> list[Any]:
    """Return the images of a conversation, or their addresses, in order."""
    return [
        next((part[name] for name in IMAGE_FIELDS if name in part), None)
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if _is_image(part)
    ]


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"


def _without_images(message: Message) -> Message:
    """Return a message with placeholders instead of its images."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [{"type": "image"} if _is_image(part) else part for part in content]
    return {**message, "content": parts}
