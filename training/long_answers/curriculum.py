"""The stages of the training, from copying to long answers.

At an arrow, the model has to look up the symbol before the arrow, not the arrow itself. Without
help the network did not learn this: 500 steps after it had learned to copy, it still guessed among
the prompt's symbols. So the layer that learned to copy is duplicated one layer up, and a loss
makes the lower one predict the symbol at the arrow. The needle model learns its two hops in the
same way.
"""

from __future__ import annotations

import random

import attrs

from training import trainer
from training.batches import TOKENS_PER_STEP
from training.needle.batches import Batch, copy_batch

from .batches import row_batch, row_task


@attrs.frozen
class Stage(trainer.Stage):
    """One stage of the training of the model with long answers.

    Args:
        statements: fewest and most of a row; None for rows of copied symbols.
        loop_share: share of the rows that walk a loop. In the others no fact can be read from what
            the answer has said before.
        supervision: weight of the losses that read symbol and answer off the lower layers.
    """

    statements: tuple[int, int] | None = None
    loop_share: float = 0.25
    supervision: float = 0.0

    def draw(self, rng: random.Random) -> Batch:
        """Draw the batch of one step."""
        length = rng.choice(self.lengths)
        if self.statements is None:
            return copy_batch(rng, length)
        tasks = [
            row_task(rng, length, self.statements, self.loop_share)
            for _ in range(TOKENS_PER_STEP // length)
        ]
        return row_batch(rng, [task.draw(rng) for task in tasks])


STAGES = (
    Stage("copy", (48,), 3000, 0.90),
    Stage("answer-64", (64,), 2000, 0.97, statements=(4, 8), stack=True, supervision=1.0),
    Stage("answer-128", (128,), 1000, 0.98, statements=(4, 16), supervision=1.0),
    Stage("answer-256", (256,), 1000, 0.985, statements=(8, 32)),
    Stage("answer-512", (512,), 500, 0.99, statements=(8, 64)),
    Stage(
        "mixed",
        (128, 256, 512, 1024),
        1000,
        statements=(8, 64),
        final_learning_rate=1e-5,
    ),
)
