"""Records what a conversation has read, and answers its next turn."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import chain, repeat, takewhile
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from kvpolicy.errors import UnsupportedGenerationError
from kvpolicy.integrations.transformers.cache import PolicyCache
from kvpolicy.integrations.transformers.document import beams_of, pad_of
from kvpolicy.integrations.transformers.generation import effective_config
from kvpolicy.integrations.transformers.surface import CACHE

# The length of an answer where nothing says how long it may be.
ANSWER_LEN = 512
# What Transformers' configurations say of a length that nobody has set.
UNSET_LENGTHS = (None, 20)
# Characters of a text that a warning shows.
SHOWN = 40


@attrs.frozen(eq=False)
class ChatReading:
    """An immutable record of what a conversation has read.

    Args:
        cache: The cache, in which it is read; it is copied before it changes.
        text: The text of the conversation up to the last answer.
        answer: The text of the last answer, as it was generated, without what ends it.
        ids: The ids of both. The next turn also reads those that the cache lacks.
        images: The images of the conversation.
        offsets: How far positions differ from columns after images. Models with positions in
            several axes store this of their last prompt, as ``rope_deltas``, so that it belongs to
            another conversation when that one was asked.
    """

    cache: PolicyCache
    text: str = ""
    answer: str = ""
    ids: tuple[int, ...] = ()
    images: tuple[Any, ...] = ()
    offsets: tuple[Tensor | None, ...] = ()

    def new_from(self, text: str, images: Sequence[Any]) -> int | None:
        """Return the character from which on a conversation's text is new; None if none is.

        Templates may change the white space around an answer; the answer's ids stay.
        """
        if not self._has(images) or not text.startswith(self.text):
            return None
        rest = text[len(self.text) :]
        for form, said in ((rest, self.answer), (rest.lstrip(), self.answer.strip())):
            if form.startswith(said) and len(form) > len(said):
                return len(text) - len(form) + len(said)
        return None

    def change(self, text: str, images: Sequence[Any]) -> str:
        """Describe how a conversation differs from what was read, for a warning."""
        if not self._has(images):
            return (
                "its images have changed, and images are read in one prompt with all that comes "
                "before them"
            )
        read = self.text + self.answer
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(read, text, strict=False))))
        was, now = (each[same : same + SHOWN] for each in (read, text))
        return f"its text has changed from character {same} on, from {was!r} to {now!r}"

    def _has(self, images: Sequence[Any]) -> bool:
        same = [own is other for own, other in zip(self.images, images, strict=False)]
        return len(images) == len(self.images) and all(same)

    def with_text(self, text: str, new_ids: Sequence[int]) -> ChatReading:
        """Return the next turn's prompt: a longer text, whose new tokens are no images."""
        ids, cache = (*self.ids, *new_ids), copy.copy(self.cache)
        return attrs.evolve(self, cache=cache, text=text, ids=ids)

    def answered(
        self,
        model: Any,
        inputs: Mapping[str, Tensor],
        config: GenerationConfig,
        generation: Mapping[str, Any],
    ) -> list[int]:
        """Read the tokens that the cache lacks, and return the ids of the model's answer."""
        check_known(model, self.ids)
        for each, own in zip(_rememberers(model), chain(self.offsets, repeat(None)), strict=False):
            each.rope_deltas = own
        ids, beams = torch.tensor([self.ids], device=model.device), config.num_beams or 1
        moved = {
            name: each.to(model.device, model.dtype if each.is_floating_point() else None)
            for name, each in inputs.items()
        }
        given = {"attention_mask": torch.ones_like(ids), CACHE: self.cache, **moved, **generation}
        self.cache.batch_repeat_interleave(beams)
        output = model.generate(ids, **given)
        if beams > 1:  # the rows are those of the last step, not of the answer
            self.cache.batch_select_indices(torch.tensor([0], device=model.device))
            self.cache.crop(len(self.ids) - self.cache.get_seq_length())
        sequences = output if isinstance(output, Tensor) else output.sequences
        answer: list[int] = sequences[0, len(self.ids) :].tolist()
        return answer


def offsets_of(model: nn.Module) -> tuple[Tensor | None, ...]:
    """Return the ``offsets`` of the prompt that a model has read last."""
    return tuple(each.rope_deltas for each in _rememberers(model))


def _rememberers(model: nn.Module) -> list[Any]:
    return [each for each in model.modules() if hasattr(each, "rope_deltas")]


def complete(
    model: Any, tokenizer: Any, cache: PolicyCache, generation: dict[str, Any]
) -> GenerationConfig:
    """Add what a chat needs to the arguments of `generate`; return the generation settings."""
    beams = beams_of(model, generation)
    croppable = all(layer.is_croppable for layer in cache.layers)
    if beams > 1 and (cache.policy.decoding is not None or not croppable):
        raise UnsupportedGenerationError(
            "num_beams must be 1 in a conversation if answers cannot be removed from the cache, "
            f"as with recurrent layers or under a policy that evicts while decoding, got {beams}"
        )
    config = effective_config(model, (), generation)
    if config.max_new_tokens is None and config.max_length in UNSET_LENGTHS:
        generation["max_new_tokens"] = ANSWER_LEN
    if config.eos_token_id is None and tokenizer.eos_token_id is not None:
        generation["eos_token_id"] = tokenizer.eos_token_id
    if config.stop_strings is not None:
        generation.setdefault("tokenizer", tokenizer)
    generation.setdefault("pad_token_id", pad_of(tokenizer))
    return effective_config(model, (), generation)


def check_known(model: Any, ids: Sequence[int]) -> None:
    """Check that a model's vocabulary has all token ids."""
    rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if not ids or (rows is not None and max(ids) >= rows):
        made = f"the token {max(ids)}" if ids else "no token"
        raise ValueError(
            f"tokenizer must be the model's, which has {rows} tokens, got one that makes {made}"
        )
