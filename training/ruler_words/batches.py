"""Build batches of training rows: token ids, positions, targets, and masks of the blindfold."""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from kvpolicy.evaluation.tasks.ruler_words.questions import KINDS
from kvpolicy.evaluation.tasks.ruler_words.vocabulary import BOS, TOKEN_IDS
from training.batches import IGNORED, skipped_positions

from .rows import Row

MAX_POSITION = 2304


@attrs.frozen
class Batch:
    """The rows of one training step; fields are ``[batch, length]`` unless said otherwise.

    Attributes:
        input_ids: token ids.
        positions: rotary positions, ascending along each row.
        answers: the next token where it belongs to an answer, else ``IGNORED``.
        hops: ``[batch, length, 2]``, at the node of a two-hop question: the key that its road leads
            to, and the first word of the name; else ``IGNORED``.
        in_questions: 1.0 from the first question on.
        in_names: 1.0 on the sentences that give names.
        kinds: index into ``KINDS`` where the next token counts for a kind's accuracy.
    """

    input_ids: Tensor
    positions: Tensor
    answers: Tensor
    hops: Tensor
    in_questions: Tensor
    in_names: Tensor
    kinds: Tensor

    @classmethod
    def empty(cls, rows: int, length: int) -> Batch:
        """Return a batch of zeros without any targets."""
        tokens = torch.zeros(rows, length, dtype=torch.int64)
        return cls(
            tokens,
            tokens.clone(),
            torch.full_like(tokens, IGNORED),
            torch.full((rows, length, 2), IGNORED),
            torch.zeros(rows, length),
            torch.zeros(rows, length),
            torch.full_like(tokens, IGNORED),
        )


def row_batch(rng: random.Random, rows: Sequence[Row], length: int) -> Batch:
    """Return one step's batch of rows, each of ``length`` tokens, ``<bos>`` included."""
    batch = Batch.empty(len(rows), length)
    for index, row in enumerate(rows):
        pieces = [[BOS], *map(_ids, row.document)]
        pieces += [_ids(asked.question.words + asked.question.answer) for asked in row.asked]
        _mark(batch, index, row)
        batch.input_ids[index] = torch.tensor([token for piece in pieces for token in piece])
        batch.positions[index] = skipped_positions(rng, pieces, length, MAX_POSITION)
    return batch


def _mark(batch: Batch, index: int, row: Row) -> None:
    """Fill in one row's targets and masks."""
    position = 1
    for sentence in row.document:
        stop = position + len(sentence)
        batch.in_names[index, position:stop] = float("call" in sentence)
        position = stop
    batch.in_questions[index, position:] = 1.0
    for asked in row.asked:
        question = asked.question
        if question.through is not None:
            key, name = _ids((question.through, question.outputs[0]))
            batch.hops[index, position + question.words.index(question.answer[1])] = torch.tensor(
                (key, name)
            )
        position += len(question.words)
        for offset, word in enumerate(question.answer):
            batch.answers[index, position - 1 + offset] = TOKEN_IDS[word]
            if word in question.outputs:
                batch.kinds[index, position - 1 + offset] = KINDS.index(asked.kind)
        position += len(question.answer)


def _ids(words: Sequence[str]) -> list[int]:
    return [TOKEN_IDS[word] for word in words]
