"""Records what a conversation has read, and where its text may change without reading it again."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from kvpolicy.integrations.transformers.cache import PolicyCache
from kvpolicy.integrations.transformers.chat.template import common_len

# Characters of a text that a warning shows.
SHOWN = 40


@attrs.frozen
class Mark:
    """A place in a conversation, in token ids and characters, from which another text may continue.

    Args:
        ids: Number of ids before it.
        chars: Number of characters of the text before it.
    """

    ids: int
    chars: int


@attrs.frozen(eq=False)
class ChatReading:
    """An immutable record of what a conversation has read.

    Args:
        cache: The cache, in which it is read; it is copied before it changes.
        text: The text of all tokens, answers as they were generated.
        ids: The ids of all tokens, also of the last of an answer, which is not read yet.
        marks: Where another text may go on, last first.
        images: The images among it.
        of_tokens: Further inputs of the model with a number for each token, ``[1, len]``.
        offsets: See `offsets_of`.
    """

    cache: PolicyCache
    text: str = ""
    ids: tuple[int, ...] = ()
    marks: tuple[Mark, ...] = (Mark(0, 0),)
    images: tuple[Any, ...] = ()
    of_tokens: dict[str, Tensor] = attrs.field(factory=dict)
    offsets: tuple[Tensor | None, ...] = ()

    def until(self, text: str) -> Mark | None:
        """Return the last mark before which a text equals what was read; None if there is none."""
        for mark in self.marks:
            same = text[: mark.chars] == self.text[: mark.chars] and len(text) > mark.chars
            if same and self._may_return_to(mark):
                return mark
        return None

    def _may_return_to(self, mark: Mark) -> bool:
        tokens, count = self.cache._reader.tokens, self._beyond(mark)
        if count <= 0 or tokens is None:
            return True
        croppable = all(layer.is_croppable for layer in self.cache.layers)
        return croppable and count <= tokens.appended.shape[1]

    def _beyond(self, mark: Mark) -> int:
        return self.cache.get_seq_length() - mark.ids

    def has_images(self, images: Sequence[Any]) -> bool:
        """True if a conversation's images are those that were read."""
        alike = (
            own is other or (isinstance(own, str) and own == other)
            for own, other in zip(self.images, images, strict=False)
        )
        return len(images) == len(self.images) and all(alike)

    def inputs_for(self, count: int) -> dict[str, Tensor]:
        """Return the model's other inputs for ``count`` tokens, of which the new ones are text."""
        return {
            name: torch.nn.functional.pad(values, (0, count - values.shape[1]))
            for name, values in self.of_tokens.items()
        }

    def copied(self, mark: Mark) -> PolicyCache:
        """Return a copy of the cache with only the tokens up to a mark."""
        cache = copy.copy(self.cache)
        if self._beyond(mark) > 0:
            cache.crop(-self._beyond(mark))
        return cache

    def change(self, text: str, images: Sequence[Any]) -> str:
        """Describe how a conversation differs from what was read, for a warning."""
        if not self.has_images(images):
            return (
                "its images have changed, and images are read in one prompt with all that comes "
                "before them"
            )
        same = common_len(self.text, text)
        was, now = (each[same : same + SHOWN] for each in (self.text, text))
        return f"its text has changed from character {same} on, from {was!r} to {now!r}"


def offsets_of(model: nn.Module) -> tuple[Tensor | None, ...]:
    """Return how far positions differ from columns after images, as a model has stored it.

    Models of images with positions in several axes hold this of their last prompt, as
    ``rope_deltas``, so that it belongs to another conversation when that one was asked.
    """
    return tuple(each.rope_deltas for each in _rememberers(model))


def set_offsets(model: nn.Module, offsets: tuple[Tensor | None, ...]) -> None:
    """Store in a model what `offsets_of` returned; None if it had stored nothing."""
    for each, own in zip(_rememberers(model), chain(offsets, repeat(None)), strict=False):
        each.rope_deltas = own


def _rememberers(model: nn.Module) -> list[Any]:
    return [each for each in model.modules() if hasattr(each, "rope_deltas")]


def per_token(inputs: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Return those inputs of a model that have an entry for each of ``count`` tokens."""
    return {name: each for name, each in inputs.items() if each.shape == (1, count)}
