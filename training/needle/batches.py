"""Build batches of training rows: token ids, positions, targets, and masks of the blindfold."""

import random
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from kvpolicy.evaluation.tasks.needle.vocabulary import KEY
from training.batches import IGNORED, TOKENS_PER_STEP, skipped_positions
from training.network import MAX_POSITION

from .rows import NeedleRow, RowPlan, copy_row, needle_row


@attrs.frozen
class Batch:
    """The rows of one training step; every field is ``[batch, length]``.

    Attributes:
        input_ids: token ids.
        positions: rotary positions, ascending along each row and below ``MAX_POSITION``.
        answers: the next token where it belongs to an answer, else ``IGNORED``.
        others: the next token where it belongs to no answer, else ``IGNORED``.
        bridges: at the last token of a two-hop question the key that the link leads to, else
            ``IGNORED``.
        in_questions: 1.0 from the first question on.
        in_pairs: 1.0 on the pairs of the context.
    """

    input_ids: Tensor
    positions: Tensor
    answers: Tensor
    others: Tensor
    bridges: Tensor
    in_questions: Tensor
    in_pairs: Tensor

    @classmethod
    def empty(cls, rows: int, length: int) -> "Batch":
        """Return a batch of zeros without any targets."""
        tokens = torch.zeros(rows, length, dtype=torch.int64)
        targets, mask = torch.full_like(tokens, IGNORED), torch.zeros(rows, length)
        return cls(
            input_ids=tokens,
            positions=tokens.clone(),
            answers=targets,
            others=targets.clone(),
            bridges=targets.clone(),
            in_questions=mask,
            in_pairs=mask.clone(),
        )


def copy_batch(rng: random.Random, length: int) -> Batch:
    """Return one step's batch of rows with repeated parts."""
    rows = TOKENS_PER_STEP // length
    batch = Batch.empty(rows, length)
    for index in range(rows):
        row, known = copy_row(rng, length)
        batch.input_ids[index] = torch.tensor(row)
        batch.positions[index] = torch.arange(length) + rng.randrange(512)
        batch.answers[index, known] = batch.input_ids[index, [position + 1 for position in known]]
    return batch


def needle_batch(rng: random.Random, plans: Sequence[RowPlan]) -> Batch:
    """Return one step's batch of needle rows of equal length."""
    length = plans[0].length
    batch = Batch.empty(len(plans), length)
    for index, plan in enumerate(plans):
        row = needle_row(rng, plan)
        pieces = row.context + row.asked
        tokens = torch.tensor([token for piece in pieces for token in piece])
        batch.input_ids[index] = tokens
        batch.positions[index] = skipped_positions(rng, pieces, length, MAX_POSITION)
        batch.others[index, :-1] = tokens[1:]
        _mark(batch, index, row)
    return batch


def _mark(batch: Batch, index: int, row: NeedleRow) -> None:
    """Fill in one row's targets and masks."""
    position = 0
    for piece in row.context:
        batch.in_pairs[index, position : position + len(piece)] = float(piece[:1] == [KEY])
        position += len(piece)
    batch.in_questions[index, position:] = 1.0
    for number, piece in enumerate(row.asked):
        if number % 2:
            answers = slice(position + 1, position + len(piece) - 1)
            batch.answers[index, answers] = torch.tensor(piece[2:])
            batch.others[index, answers] = IGNORED
            bridge = row.bridges[number // 2]
            batch.bridges[index, position + 1] = IGNORED if bridge is None else bridge
        position += len(piece)
