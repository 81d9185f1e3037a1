"""Configures a second reading: the prompt is fed again, and its attention scores the keys."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs

from kvpolicy.checks import as_tuple, check_count
from kvpolicy.short_repr import brief

# KVzip's instructions after the context; in later chunks, the overlap follows.
FIRST_INSTRUCTION = "\n\nRepeat the previous context exactly."
LATER_INSTRUCTION = "\n\nRepeat the part of the previous context exactly, starting with"


def _instruction(given: Iterable[int]) -> tuple[int, ...]:
    return as_tuple("instruction_ids", "token ids", given)


def _later(given: Iterable[int] | None) -> tuple[int, ...] | None:
    return None if given is None else as_tuple("later_ids", "token ids", given)


def _answer(given: Iterable[int]) -> tuple[int, ...]:
    return as_tuple("answer_ids", "token ids", given)


@attrs.frozen
class Repetition:
    """Settings of a second reading of the prompt, in chunks, whose attention scores its keys.

    After the prompt has been read once, while every layer still holds all of it, it is fed again
    chunk by chunk. Each time an instruction to repeat the prompt is fed first, then the last tokens
    of the previous chunk, then the chunk. These tokens have positions after the prompt and attend
    to all of it; their own keys are not kept. For each layer and chunk the policy's scorer gets the
    queries of all repeated tokens, and the keys of the prompt's first tokens, of the chunk as the
    layer holds it, and of the repeated tokens themselves. Its softmax runs over these keys. The
    saliency of the chunk's keys is the result.

    In a later conversation turn all earlier turns are repeated too; a layer scores those of their
    tokens that it still holds.

    Args:
        chunk_size: Tokens of a chunk, at least 1.
        num_sinks: First tokens of the context whose keys are shown with every chunk, at least 0.
        overlap: Last tokens of the previous chunk that are fed before each chunk, at least 0.
        instruction_ids: Ids of the instruction before the first chunk; none by default, since a
            policy has no tokenizer: see `asking`.
        later_ids: Ids of the instruction before every later chunk; the first instruction if None.
        answer_ids: Ids between the overlap and the chunk, such as those that begin a chat answer.
        unrepeated: First tokens of the context that are not repeated, such as a system prompt, at
            least 0; the first chunk begins after them. They get no saliency: let the selector
            protect them, or keep them by `kvpolicy.policies.FirstTokensWholeSelector`.

    Raises:
        TypeError: A number or an id is not an int.
        ValueError: ``chunk_size`` is below 1, or another number or an id negative.

    Example:
        >>> Repetition(chunk_size=1000).spans(2500)
        [(0, 1000), (1000, 2000), (2000, 2500)]
        >>> Repetition(chunk_size=1000, num_sinks=120, unrepeated=120).spans(2500)
        [(120, 1120), (1120, 2120), (2120, 2500)]

    Source: KVzip (arXiv 2505.23416), section 3.
    """

    chunk_size: int = 2048
    num_sinks: int = attrs.field(default=4, kw_only=True)
    overlap: int = attrs.field(default=8, kw_only=True)
    instruction_ids: tuple[int, ...] = attrs.field(default=(), converter=_instruction, kw_only=True)
    later_ids: tuple[int, ...] | None = attrs.field(default=None, converter=_later, kw_only=True)
    answer_ids: tuple[int, ...] = attrs.field(default=(), converter=_answer, kw_only=True)
    unrepeated: int = attrs.field(default=0, kw_only=True)

    def __attrs_post_init__(self) -> None:
        check_count("chunk_size", self.chunk_size, minimum=1)
        check_count("num_sinks", self.num_sinks)
        check_count("overlap", self.overlap)
        check_count("unrepeated", self.unrepeated)
        for name in ("instruction_ids", "later_ids", "answer_ids"):
            for each in getattr(self, name) or ():
                check_count(f"every id of {name}", each)

    def __str__(self) -> str:
        return brief(self)

    @classmethod
    def asking(
        cls,
        tokenizer: Any,
        first: str = FIRST_INSTRUCTION,
        later: str = LATER_INSTRUCTION,
        **parameters: Any,
    ) -> Repetition:
        """Make the settings from instruction texts, which a tokenizer encodes.

        Args:
            tokenizer: An object whose ``encode(text, add_special_tokens=False)`` returns ids.
            first: The instruction before the first chunk.
            later: The instruction before every later chunk; the overlap follows it.
            parameters: Further arguments of the class.
        """
        asked = (tokenizer.encode(text, add_special_tokens=False) for text in (first, later))
        return cls(**parameters, **dict(zip(("instruction_ids", "later_ids"), asked, strict=True)))

    def spans(self, length: int) -> list[tuple[int, int]]:
        """Return the start and exclusive end position of every chunk that is read again."""
        starts = range(self.unrepeated, length, self.chunk_size)
        return [(start, min(start + self.chunk_size, length)) for start in starts]

    def before(self, start: int) -> tuple[tuple[int, ...], int]:
        """Return the instruction and overlap that the model reads before repeating a chunk.

        Args:
            start: The chunk's first position.

        Returns:
            The instruction's ids, and how many of the tokens before the chunk follow them.
        """
        later = self.instruction_ids if self.later_ids is None else self.later_ids
        repeated = start - self.unrepeated
        return (later if repeated else self.instruction_ids), min(repeated, self.overlap)

    def compute_rate(self, context_len: int | None = None) -> float:
        """Return the number of tokens fed in the second reading, divided by the prompt's length.

        Args:
            context_len: Tokens of the context; None for a long context with a full last chunk.
        """
        if context_len is None:
            return 1 + self._ahead(self.unrepeated + self.chunk_size) / self.chunk_size
        chunks = self.spans(context_len)
        return sum(stop - start + self._ahead(start) for start, stop in chunks) / context_len

    def _ahead(self, start: int) -> int:
        """Count the tokens that the model reads before the chunk that begins at a position."""
        ids, overlap = self.before(start)
        return len(ids) + overlap + len(self.answer_ids)
