"""What vLLM does with a document, in stock Transformers: its entries, then the question."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.surface import CACHE
from kvpolicy.integrations.vllm import ServedDocument
from kvpolicy.policy import CachePolicy
from tests.integrations.support.reading import read


def plain_cache(document: ServedDocument) -> DynamicCache:
    """A cache of Transformers that holds a document's entries."""
    cache = DynamicCache()
    entries = document.entries(range(document.facts.layers))
    for index, pair in entries.items():
        keys, values = (each.transpose(0, 1)[None] for each in pair)
        cache.update(keys, values, index)
    return cache


@torch.no_grad()
def served_logits(model: Any, document: ServedDocument, question: Tensor) -> Tensor:
    """Logits of a question ``[count]`` that directly follows a document's entries."""
    places = torch.arange(document.length, document.length + len(question))[None]
    output = model(question[None], **{CACHE: plain_cache(document)}, position_ids=places)
    return output.logits[0]


def read_prompt(
    model: Any, policy: CachePolicy, ids: Tensor, mask: Tensor | None = None
) -> PolicyCache:
    return read(model, policy, ids, mask)[0]


@torch.no_grad()
def appended_logits(model: Any, cache: PolicyCache, question: Tensor) -> Tensor:
    """Logits of a question that is appended to a cache of one row."""
    with cache.attached(model):
        return model(question[None], cache=cache).logits[0]


def damage(path: Path, name: str = "layers.3.values") -> None:
    """Change one byte in the middle of a tensor in a document's file."""
    whole = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(whole[:8], "little")
    start, end = json.loads(whole[8:header])[name]["data_offsets"]
    whole[header + (start + end) // 2] ^= 1
    path.write_bytes(whole)
