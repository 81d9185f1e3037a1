"""Draw batches of training rows, each a prompt and its answer; only the answer is a target."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from kvpolicy.evaluation.tasks.long_answers.task import STEP_TOKENS, LongAnswerTask, LongPrompt
from kvpolicy.evaluation.tasks.long_answers.vocabulary import FILLERS, LET
from training.batches import skipped_positions
from training.needle.batches import Batch

MAX_POSITION = 2048
# Tokens of a prompt that are neither statement nor filler, and tokens of one statement.
_FRAME, _STATEMENT = 4, 3


def row_task(
    rng: random.Random, length: int, statements: tuple[int, int], loop_share: float
) -> LongAnswerTask:
    """Draw the task (kind, statements, steps) of a training row of ``length`` tokens.

    Args:
        rng: source of the draws.
        length: tokens of the row.
        statements: fewest and most statements; fewer where the row has no room for the most.
        loop_share: chance of a loop, in [0, 1].
    """
    fewest, most = statements
    room = length - _FRAME
    if rng.random() < loop_share:
        # At least one step to each statement of the loop that is walked: half of them.
        pairs = rng.randint(fewest // 2, min(most, room // (_STATEMENT + STEP_TOKENS // 2)) // 2)
        longest = (room - 2 * pairs * _STATEMENT) // STEP_TOKENS
        steps = rng.randint(min(pairs, longest), longest)
        return LongAnswerTask("loop", length - STEP_TOKENS * steps, 2 * pairs, steps)
    count = rng.randint(fewest, min(most, room // (_STATEMENT + STEP_TOKENS)))
    steps = rng.randint((count + 1) // 2, count)
    return LongAnswerTask("chain", length - STEP_TOKENS * steps, count, steps)


def row_batch(rng: random.Random, rows: Sequence[LongPrompt]) -> Batch:
    """Return the batch of one step, with rows of equal length."""
    length = len(rows[0].input_ids) + len(rows[0].answer)
    batch = Batch.empty(len(rows), length)
    for index, row in enumerate(rows):
        prompt_len = len(row.input_ids)
        batch.input_ids[index] = torch.tensor(row.input_ids + row.answer)
        batch.answers[index, prompt_len - 1 : -1] = torch.tensor(row.answer)
        # At an arrow, the symbol whose statement is to be looked up: the token before.
        batch.bridges[index, prompt_len + 1 :: STEP_TOKENS] = torch.tensor(
            row.answer[::STEP_TOKENS]
        )
        batch.positions[index] = skipped_positions(rng, _pieces(row), length, MAX_POSITION)
    return batch


def _pieces(row: LongPrompt) -> list[list[int]]:
    """Split a row into pieces between which positions may jump; the answer stays in one piece."""
    question = len(row.input_ids) - 3
    starts = [
        at
        for at, token in enumerate(row.input_ids[:question])
        if at == 0 or token == LET or token in FILLERS
    ]
    tokens = [*row.input_ids, *row.answer]
    stops = [*starts[1:], question, len(tokens)]
    return [tokens[start:stop] for start, stop in zip([*starts, question], stops, strict=True)]
