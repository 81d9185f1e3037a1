"""How a library reads a prompt: the surface that both workers have. Needs torch and Transformers.

Methods go by one name in both libraries; "full" and "full_eager" are the model alone, on
Transformers' own cache.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel

Settings = Mapping[str, Any]
"""``rate``, ``window_size``, ``kernel_size`` and ``num_sinks``: the same for both libraries."""

Kept = list[list[list[list[int]]]]
"""Positions kept, ``[layer][row][head]``: ascending, a row's own tokens counted from 0."""

PLAIN = ("full", "full_eager")
PAD = 0
"""Token of padding; no prompt has it."""

REPETITION = {
    "chunk_size": 2048,
    "instruction_ids": (5, 6, 7),
    "later_ids": (8, 9),
    "answer_ids": (10,),
}
"""How both libraries ask for the prompt again: ids in the place of words."""


class Reading:
    """A model with a cache and, in subclasses, a method: this one evicts nothing."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.cache: Any = DynamicCache(config=model.config)

    def prefilling(self) -> AbstractContextManager[Any]:
        """Around a forward that reads a prompt."""
        return nullcontext()

    def decoding(self) -> AbstractContextManager[Any]:
        """Around forwards of decoded tokens."""
        return nullcontext()

    def generating(self) -> AbstractContextManager[Any]:
        """Around a call of ``generate``."""
        return self.prefilling()

    def start_turn(self) -> None:
        """Say that the next forward reads another prompt, where a library wants to hear it."""

    def kept(self, lengths: Sequence[int]) -> Kept:
        """What was kept of the first prompt; padding that was kept is below 0.

        Args:
            lengths: The prompt's tokens in each row, which is padded on the left.
        """
        raise NotImplementedError

    def held(self) -> list[int]:
        """Slots that each layer holds for a KV head."""
        return [layer.keys.shape[2] for layer in self.cache.layers]

    def held_bytes(self) -> int:
        """Bytes of all keys and values."""
        tensors = [part for layer in self.cache.layers for part in (layer.keys, layer.values)]
        return sum(part.numel() * part.element_size() for part in tensors)


class Library(abc.ABC):
    """A library under comparison."""

    packages: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        self._models: dict[tuple[str, str], LlamaForCausalLM] = {}

    def versions(self) -> dict[str, str]:
        """Versions of what was measured."""
        return {"torch": torch.__version__} | {name: version(name) for name in self.packages}

    def attention(self, method: str) -> str:
        """Attention implementation of Transformers that a method is run with."""
        return "eager" if method == "full_eager" else "sdpa"

    def model(self, folder: str, method: str) -> LlamaForCausalLM:
        """The model of a folder as a method needs it, loaded once."""
        attention = self.attention(method)
        if (folder, attention) not in self._models:
            model = LlamaForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation=attention
            ).eval()
            model.generation_config.eos_token_id = None  # every run decodes as many tokens
            model.generation_config.pad_token_id = PAD
            self._models[folder, attention] = model
        return self._models[folder, attention]

    def begin(
        self, model: PreTrainedModel, method: str, settings: Settings, *, watched: bool = False
    ) -> Reading:
        """A fresh cache under a method.

        Args:
            model: What reads.
            method: Its name.
            settings: Its parameters.
            watched: Whether `Reading.kept` is going to be asked.
        """
        if method in PLAIN:
            return Reading(model)
        return self.begin_method(model, method, settings, watched=watched)

    @abc.abstractmethod
    def begin_method(
        self, model: PreTrainedModel, method: str, settings: Settings, *, watched: bool
    ) -> Reading:
        """As `begin`, for a method that evicts."""

    @abc.abstractmethod
    def count(self, length: int, rate: float) -> int:
        """Tokens kept of a prompt under the library's rule, no window or sinks considered."""


def left_padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Token ids and mask ``[batch, longest]``."""
    longest = max(map(len, rows))
    padding = [longest - len(row) for row in rows]
    ids = torch.tensor([[PAD] * pad + list(row) for pad, row in zip(padding, rows, strict=True)])
    mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
    return ids, mask


def match_rows(kept: Tensor, full: Tensor) -> list[int]:
    """Where the rows of one tensor stand in another, by equality, bit for bit.

    Rows that stand there more than once (keys of padding) take its places one after the other.

    Args:
        kept: ``[kept_len, head_dim]``.
        full: ``[key_len, head_dim]``.

    Returns:
        Indices into ``full``, ascending.

    Raises:
        ValueError: A row is not there, or more often than in ``full``.
    """
    places: dict[tuple[float, ...], list[int]] = {}
    for index, row in enumerate(full.tolist()):
        places.setdefault(tuple(row), []).append(index)
    found = []
    for row in kept.tolist():
        left = places.get(tuple(row))
        if not left:
            raise ValueError("kept must hold rows of full, each once, got one that is not left")
        found.append(left.pop(0))
    return sorted(found)
