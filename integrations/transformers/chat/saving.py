"""Write a conversation's text and settings into the file of its cache, and read them."""

import base64
import io
import json
import os
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from kvpolicy.integrations.transformers.cache import PolicyCache
from kvpolicy.integrations.transformers.chat.reading import ChatReading
from kvpolicy.integrations.transformers.chat.template import images_of

VERSION = 1
# Stands for an image in JSON.
PNG = "kvpolicy-png"
# What a file must hold.
KINDS = {
    "text": str,
    "answer": str,
    "messages": list,
    "added": list,
    "template_options": dict,
    "rereadings": int,
}


def packed(reading: ChatReading, **settings: Any) -> str:
    """Return a conversation except its cache as JSON.

    ``settings`` are all else that it continues from: ``messages``, ``added`` (the parts of the next
    message), ``template_options``, ``vocabulary`` (a fingerprint of it) and ``rereadings``.
    """
    written = {name: json.loads(_dumped(name, value)) for name, value in settings.items()}
    return json.dumps(
        {
            "version": VERSION,
            "text": reading.text,
            "answer": reading.answer,
            "unread": reading.ids[reading.cache.get_seq_length() :],
            "offsets": [None if each is None else each.tolist() for each in reading.offsets],
            **written,
        }
    )


def unpacked(
    path: str | os.PathLike[str], cache: PolicyCache
) -> tuple[ChatReading, dict[str, Any]]:
    """Read a conversation from a file; return what `packed` got, or raise ValueError."""
    with safe_open(os.fspath(path), framework="pt") as file:
        text = (file.metadata() or {}).get("conversation")
    if text is None:
        raise ValueError(
            f"path must be a file of Conversation.save, got {path}, which holds only a cache; "
            "use PolicyCache.load"
        )
    try:
        found = json.loads(text, object_hook=_with_image)
        if found["version"] != VERSION:
            raise ValueError(f"version must be {VERSION}, got {found['version']}")
        _check(found)
        assert cache._reader.tokens is not None
        read = cache._reader.tokens.ids[0].tolist()
        reading = ChatReading(
            cache,
            found["text"],
            found["answer"],
            (*read, *map(int, found["unread"])),
            tuple(images_of(found["messages"])),
            tuple(None if each is None else torch.tensor(each) for each in found["offsets"]),
        )
    except (KeyError, TypeError, AttributeError, ValueError, OSError) as error:
        raise ValueError(
            f"path must be a whole file of Conversation.save, got {path}: {error!r}"
        ) from None
    return reading, found


def _check(found: Mapping[str, Any]) -> None:
    for name, kind in KINDS.items():
        if not isinstance(found[name], kind):
            raise ValueError(f"{name} must be a {kind.__name__}, got {found[name]!r:.80}")
    for message in found["messages"]:
        if not isinstance(message["role"], str):
            raise ValueError(f"messages must have roles, got {message!r:.80}")


def _dumped(name: str, value: Any) -> str:
    try:
        return json.dumps(value, default=_as_json)
    except (TypeError, ValueError) as error:
        remedy = "; make tools with transformers.utils.get_json_schema"
        raise TypeError(
            f"{'image' if name == 'added' else name} must consist of texts, numbers, lists, "
            "mappings or PIL images to be saved, "
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
