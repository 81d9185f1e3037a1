"""Batches of training rows: token ids, positions and answers."""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from kvpolicy.evaluation.tasks.needle.batches import skipped_positions
from kvpolicy.evaluation.tasks.ruler_words.questions import KINDS
from kvpolicy.evaluation.tasks.ruler_words.vocabulary import BOS, TOKEN_IDS

from .rows import Row

TOKENS_PER_STEP = 4096
MAX_POSITION = 2304
NONE = -100


@attrs.frozen
class Batch:
    """One step's rows, ``[batch, length]`` unless said otherwise.

    Attributes:
        input_ids: token ids.
        positions: rotary positions, ascending along each row.
        answers: the next token where it belongs to an answer, else ``NONE``.
        kinds: index into ``KINDS`` where the next token counts for a kind's accuracy.
    """

    input_ids: Tensor
    positions: Tensor
    answers: Tensor
    kinds: Tensor

    @classmethod
    def empty(cls, rows: int, length: int) -> Batch:
        """Return a batch without targets."""
        tokens = torch.zeros(rows, length, dtype=torch.int64)
        return cls(
            tokens,
            tokens.clone(),
            torch.full_like(tokens, NONE),
            torch.full_like(tokens, NONE),
        )


def row_batch(rng: random.Random, rows: Sequence[Row], length: int) -> Batch:
    """Return one step of rows, each of ``length`` tokens with its ``<bos>``."""
    batch = Batch.empty(len(rows), length)
    for index, row in enumerate(rows):
        pieces = [[BOS], *(_ids(sentence) for sentence in row.document)]
        position = sum(map(len, pieces))
        for asked in row.asked:
            question = asked.question
            pieces.append(_ids(question.words + question.answer))
            position += len(question.words) - 1
            for word in question.answer:
                batch.answers[index, position] = TOKEN_IDS[word]
                if word in question.outputs:
                    batch.kinds[index, position] = KINDS.index(asked.kind)
                position += 1
            position += 1
        batch.input_ids[index] = torch.tensor([token for piece in pieces for token in piece])
        batch.positions[index] = skipped_positions(rng, pieces, length, MAX_POSITION)
    return batch


def _ids(words: Sequence[str]) -> list[int]:
    return [TOKEN_IDS[word] for word in words]
