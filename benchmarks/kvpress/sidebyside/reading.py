"""The interface by which both workers read prompts, and the libraries' common base.

Methods go by one name in both libraries; "full" and "full_eager" are the model alone, on
Transformers' own cache.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel

Settings = Mapping[str, Any]
"""``rate``, ``window_size``, ``kernel_size`` and ``num_sinks``: the same for both libraries."""

Kept = list[list[list[list[int]]]]
"""Positions kept, ``[layer][row][head]``: ascending, a row's own tokens counted from 0."""

# kvpress needs a Transformers in which this argument has its earlier name.
CACHE = "cache" if "cache" in signature(LlamaForCausalLM.forward).parameters else "past_key_values"
"""The name of the cache argument in the installed Transformers."""

PLAIN = ("full", "full_eager")
PAD = 0
"""Token of padding; no prompt has it."""

REPETITION = {
    "chunk_size": 2048,
    "instruction_ids": (5, 6, 7),
    "later_ids": (8, 9),
    "answer_ids": (10,),
}
"""The instructions with which both libraries ask for the prompt again, as ids instead of words."""


class Reading:
    """A model with a cache; this base class evicts nothing, subclasses apply a method."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.cache: Any = DynamicCache(config=model.config)

    def prefilling(self) -> AbstractContextManager[Any]:
        """Return a context manager to enter around a forward that reads a prompt."""
        return nullcontext()

    def decoding(self) -> AbstractContextManager[Any]:
        """Return a context manager to enter around forwards of decoded tokens."""
        return nullcontext()

    def generating(self) -> AbstractContextManager[Any]:
        """Return a context manager to enter around a call of ``generate``."""
        return self.prefilling()

    def start_turn(self) -> None:
        """Announce that the next forward reads another prompt; this base class does nothing."""

    def kept(self, lengths: Sequence[int]) -> Kept:
        """Return the positions that each layer and head keeps of the first prompt.

        Args:
            lengths: The prompt's tokens in each row, which is padded on the left.
        """
        raise NotImplementedError

    def held(self) -> list[int]:
        """Return the number of slots that each layer holds per KV head."""
        return [layer.keys.shape[2] for layer in self.cache.layers]

    def held_bytes(self) -> int:
        """Return the bytes of all keys and values."""
        tensors = [part for layer in self.cache.layers for part in (layer.keys, layer.values)]
        return sum(part.numel() * part.element_size() for part in tensors)


class Library(abc.ABC):
    """A library under comparison."""

    packages: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        self._models: dict[tuple[str, str], LlamaForCausalLM] = {}

    def versions(self) -> dict[str, str]:
        """Return the versions of torch and of the library's packages."""
        return {"torch": torch.__version__} | {name: version(name) for name in self.packages}

    def attention(self, method: str) -> str:
        """Return the attention implementation of Transformers with which a method is run."""
        return "eager" if method == "full_eager" else "sdpa"

    def model(self, folder: str, method: str) -> LlamaForCausalLM:
        """Load the model in a folder once, with the attention implementation a method needs."""
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
        """Begin the reading of a prompt with a new cache under a method.

        Args:
            model: The model that reads.
            method: Name of the method.
            settings: Parameters of the method.
            watched: Whether `Reading.kept` will be called.
        """
        if method in PLAIN:
            return Reading(model)
        return self.begin_method(model, method, settings, watched=watched)

    @abc.abstractmethod
    def begin_method(
        self, model: PreTrainedModel, method: str, settings: Settings, *, watched: bool
    ) -> Reading:
        """Begin the reading of a prompt under a method that evicts; see `begin`."""

    @abc.abstractmethod
    def count(self, length: int, rate: float) -> int:
        """Return the number of tokens kept of a prompt by the library's rule."""


def left_padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return token ids and mask of left-padded prompts, ``[batch, longest]``."""
    longest = max(map(len, rows))
    padding = [longest - len(row) for row in rows]
    ids = torch.tensor([[PAD] * pad + list(row) for pad, row in zip(padding, rows, strict=True)])
    mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
    return ids, mask


def match_rows(kept: Tensor, full: Tensor) -> list[int]:
    """Return where the rows of one tensor occur in another, by exact comparison.

    Equal rows of ``full`` (keys of padding) are used up one after the other.

    Args:
        kept: ``[kept_len, head_dim]``.
        full: ``[key_len, head_dim]``.

    Returns:
        Indices into ``full``, ascending.

    Raises:
        ValueError: A row does not occur in ``full``, or occurs more often than there.
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
