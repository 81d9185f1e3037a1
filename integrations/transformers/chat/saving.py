"""Write a conversation's text and settings into the file of its cache, and read them."""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from safetensors import safe_open
from torch import Tensor

from kvpolicy.integrations.transformers.cache import PolicyCache
from kvpolicy.integrations.transformers.chat.reading import ChatReading, Mark
from kvpolicy.integrations.transformers.chat.template import Message, images_of

VERSION = 1
# Stands for an image in JSON.
PNG = "kvpolicy-png"


@attrs.frozen(eq=False)
class SavedChat:
    """A conversation as it is written to a file and read from one.

    Args:
        messages: Its messages.
        added: The parts of the next message.
        reading: What it has read.
        options: The options of the chat template.
        vocabulary: The fingerprint of the tokenizer.
        rereadings: How often it was read again from its start.
    """

    messages: list[Message]
    added: list[dict[str, Any]]
    reading: ChatReading
    options: dict[str, Any]
    vocabulary: str
    rereadings: int

    def packed(self) -> str:
        """Return everything except the cache as JSON.

        Raises:
            TypeError: The options or a message cannot be written as JSON.
        """
        reading = self.reading
        return json.dumps(
            {
                "version": VERSION,
                "messages": json.loads(_dumped("messages", self.messages)),
                "added": json.loads(_dumped("image", self.added)),
                "options": json.loads(_dumped("template_options", self.options)),
                "vocabulary": self.vocabulary,
                "rereadings": self.rereadings,
                "text": reading.text,
                "ids": reading.ids,
                "marks": [attrs.astuple(mark) for mark in reading.marks],
                "of_tokens": {name: each.tolist() for name, each in reading.of_tokens.items()},
                "offsets": [None if each is None else each.tolist() for each in reading.offsets],
            }
        )

    @staticmethod
    def read(path: str | os.PathLike[str], cache: PolicyCache) -> SavedChat:
        """Read a conversation from a file.

        Args:
            path: The file.
            cache: The cache that was loaded from it.

        Raises:
            ValueError: The file holds a cache alone, has another version, or its contents do not
                fit together.
        """
        with safe_open(os.fspath(path), framework="pt") as file:
            packed = (file.metadata() or {}).get("conversation")
        if packed is None:
            raise ValueError(
                f"path must be a file of Conversation.save, got {path}, which holds only a cache; "
                "use PolicyCache.load"
            )
        try:
            found = json.loads(packed, object_hook=_with_image)
            if found["version"] != VERSION:
                raise ValueError(f"version must be {VERSION}, got {found['version']}")
            saved = _rebuilt(found, cache)
            saved.check()
        except (KeyError, TypeError, AttributeError, ValueError, OSError) as error:
            raise ValueError(
                f"path must be a whole file of Conversation.save, got {path}: {error!r}"
            ) from None
        return saved

    def check(self) -> None:
        """Check that the loaded parts of a conversation fit together.

        Raises:
            ValueError: They do not.
        """
        reading, tokens = self.reading, self.reading.cache._reader.tokens
        ids = torch.tensor(reading.ids, dtype=torch.int64)
        if tokens is None or tokens.batch != 1 or tokens.seen > len(ids):
            raise ValueError(
                "ids must hold at least the tokens of the cache, which must have one row"
            )
        if tokens.first_unlike(ids[None]) is not None:
            raise ValueError("ids must begin with the tokens that the cache has read")
        for mark in reading.marks:
            if not (0 < mark.ids <= len(ids) and 0 <= mark.chars <= len(reading.text)):
                raise ValueError(f"marks must lie within ids and text, got {mark}")
        for message in self.messages:
            if not isinstance(message["role"], str):
                raise ValueError(f"messages must have roles, got {message!r:.80}")
        if not isinstance(self.options, dict) or not isinstance(self.rereadings, int):
            raise ValueError("options must be a mapping and rereadings a number")


def _rebuilt(found: Mapping[str, Any], cache: PolicyCache) -> SavedChat:
    messages = list(found["messages"])
    reading = ChatReading(
        cache,
        str(found["text"]),
        tuple(map(int, found["ids"])),
        tuple(Mark(int(ids), int(chars)) for ids, chars in found["marks"]),
        tuple(images_of(messages)),
        {name: torch.tensor(each) for name, each in found["of_tokens"].items()},
        tuple(None if each is None else torch.tensor(each) for each in found["offsets"]),
    )
    return SavedChat(
        messages,
        list(found["added"]),
        reading,
        found["options"],
        found["vocabulary"],
        found["rereadings"],
    )


def _dumped(name: str, value: Any) -> str:
    try:
        return json.dumps(value, default=_as_json)
    except (TypeError, ValueError) as error:
        remedy = "; make tools with transformers.utils.get_json_schema"
        raise TypeError(
            f"{name} must consist of texts, numbers, lists, mappings or PIL images to be saved, "
            f"got {error}{remedy if name == 'template_options' else ''}"
        ) from error


def _as_json(value: Any) -> dict[str, str]:
    if isinstance(value, Tensor) or not hasattr(value, "convert") or not hasattr(value, "save"):
        raise TypeError(f"{value!r:.80}")
    written = io.BytesIO()
    value.save(written, format="PNG")
    return {PNG: base64.b64encode(written.getvalue()).decode()}


def _with_image(found: dict[str, Any]) -> Any:
    if set(found) != {PNG}:
        return found
    from PIL import Image

    return Image.open(io.BytesIO(base64.b64decode(found[PNG])))
