"""Read one turn of a conversation into a cache, and answer it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import attrs
import torch
from torch import Tensor
from transformers import GenerationConfig

from kvpolicy.errors import UnsupportedGenerationError
from kvpolicy.integrations.transformers.cache import PolicyCache
from kvpolicy.integrations.transformers.chat.reading import (
    ChatReading,
    Mark,
    offsets_of,
    per_token,
    set_offsets,
)
from kvpolicy.integrations.transformers.chat.template import ChatTemplate
from kvpolicy.integrations.transformers.document import beams_of, pad_of, read
from kvpolicy.integrations.transformers.generation import (
    check_generation,
    effective_config,
)
from kvpolicy.integrations.transformers.surface import CACHE

# The length of an answer where nothing says how long it may be.
ANSWER_LEN = 512
# What Transformers' configurations say of a length that nobody has set.
UNSET_LENGTHS = (None, 20)


@attrs.frozen(eq=False)
class ChatTurn:
    """A turn of a conversation: the text to read and its answer.

    Args:
        cache: A cache of its own, into which it is read.
        text: The text of the whole conversation, up to the answer.
        ids: Its token ids.
        lasting: Up to where a later turn has the same text. The rest is appended without the
            policy, so that it can be taken back.
        inputs: Further inputs of the model.
        images: The images of the conversation.
        offsets: See `offsets_of`; those of the conversation so far.
    """

    cache: PolicyCache
    text: str
    ids: list[int]
    lasting: Mark
    inputs: dict[str, Tensor]
    images: tuple[Any, ...]
    offsets: tuple[Tensor | None, ...]

    def answer(
        self, model: Any, config: GenerationConfig, generation: Mapping[str, Any]
    ) -> list[int]:
        """Read the turn into the cache; return the token ids of the answer.

        Args:
            model: The model.
            config: What `complete` returned.
            generation: The arguments of `generate`.
        """
        ids = torch.tensor([self.ids], device=model.device)
        mask = torch.ones_like(ids)
        inputs = {
            name: each.to(model.device, model.dtype if each.is_floating_point() else None)
            for name, each in self.inputs.items()
        }
        set_offsets(model, self.offsets)
        with ExitStack() as stack:
            if self.lasting.ids < len(self.ids):
                given = {**generation, "input_ids": ids, "attention_mask": mask}
                check_generation(model, self.cache, (), given)  # before anything is computed
                # Chunks must not end among an image's tokens, which `generate` knows.
                chunk = None if inputs else config.prefill_chunk_size
                of_tokens, count = per_token(inputs, len(self.ids)), self.lasting.ids
                first = inputs | {name: each[:, :count] for name, each in of_tokens.items()}
                read(model, self.cache, ids[:, :count], None, chunk_len=chunk, **first)
                inputs = of_tokens
                stack.enter_context(self.cache.appending())
            self.cache.batch_repeat_interleave(config.num_beams or 1)
            given = {"attention_mask": mask, CACHE: self.cache, **inputs, **generation}
            output = model.generate(ids, **given)
        sequences = output if isinstance(output, Tensor) else output.sequences
        answer: list[int] = sequences[0, len(self.ids) :].tolist()
        return answer

    def answered(
        self, model: Any, template: ChatTemplate, answer: list[int], beams: int | None
    ) -> ChatReading:
        """Return the record of what was read, answer included."""
        cache, count, most = self.cache, len(self.ids), len(self.ids) + len(answer)
        if (beams or 1) > 1:  # the rows are those of the last step, not of the answer
            cache.batch_select_indices(torch.tensor([0], device=model.device))
            cache.crop(count - cache.get_seq_length())
        text, short = (
            self.text + template.decode_after(self.ids, each) for each in (answer, answer[:-1])
        )
        places = ((most, len(text)), (most - 1, len(short)), (count, len(self.text)))
        return ChatReading(
            cache,
            text,
            (*self.ids, *answer),
            (*(Mark(*each) for each in places), self.lasting),
            self.images,
            per_token(self.inputs, count),
            offsets_of(model),
        )


def complete(model: Any, tokenizer: Any, generation: dict[str, Any]) -> GenerationConfig:
    """Add what a chat needs to the arguments of `generate`; return the generation settings."""
    config = effective_config(model, (), generation)
    if config.max_new_tokens is None and config.max_length in UNSET_LENGTHS:
        generation["max_new_tokens"] = ANSWER_LEN
    if config.eos_token_id is None and tokenizer.eos_token_id is not None:
        generation["eos_token_id"] = tokenizer.eos_token_id
    if config.stop_strings is not None:
        generation.setdefault("tokenizer", tokenizer)
    generation.setdefault("pad_token_id", pad_of(tokenizer))
    return effective_config(model, (), generation)


def check_beams(model: Any, cache: PolicyCache, generation: Mapping[str, Any]) -> None:
    """Check that beam search is possible: answers can be removed from the cache.

    Raises:
        TypeError: See `beams_of`.
        UnsupportedGenerationError: They cannot.
        ValueError: See `beams_of`.
    """
    beams = beams_of(model, generation)
    croppable = all(layer.is_croppable for layer in cache.layers)
    if beams > 1 and (cache.policy.decoding is not None or not croppable):
        raise UnsupportedGenerationError(
            "num_beams must be 1 in a conversation if answers cannot be removed from the cache, "
            f"as with recurrent layers or under a policy that evicts while decoding, got {beams}"
        )


def check_known(model: Any, ids: list[int]) -> None:
    """Check that a model's vocabulary has all token ids.

    Raises:
        ValueError: It does not, or there are none.
    """
    rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if not ids or (rows is not None and max(ids) >= rows):
        made = f"the token {max(ids)}" if ids else "no token"
        raise ValueError(
            f"tokenizer must be the model's, which has {rows} tokens, got one that makes {made}"
        )
