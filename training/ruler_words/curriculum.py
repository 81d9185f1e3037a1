"""The stages of the training, from short rows of lookups to long documents of all kinds."""

from __future__ import annotations

import random

import attrs

from training import trainer
from training.batches import TOKENS_PER_STEP

from .batches import Batch, row_batch
from .rows import NamesRow, list_row

LOOKUPS = ("single", "multi-query", "multi-query", "two-hop", "tracing")
MORE_HOPS = ("multi-query", "two-hop", "two-hop", "two-hop", "tracing")


@attrs.frozen
class Stage(trainer.Stage):
    """One stage of the training of the word tasks' model.

    Args:
        kinds: of the lookups in a row.
        lists_share: share of the steps whose rows ask for common and frequent words.
        most_filler: the most filler of a row, as a fraction of it.
        blindfold: share of the steps in which questions do not see names in the lower layers.
        hops_weight: weight of the losses that read both hops off the lower layers.
    """

    kinds: tuple[str, ...] = LOOKUPS
    lists_share: float = 0.15
    most_filler: float = 0.5
    blindfold: float = 0.5
    hops_weight: float = 1.0

    def draw(self, rng: random.Random) -> Batch:
        """Draw the batch of one step."""
        length = rng.choice(self.lengths)
        count = TOKENS_PER_STEP // length
        if rng.random() < self.lists_share:
            return row_batch(rng, [list_row(rng, length) for _ in range(count)], length)
        rows = [NamesRow(rng, length, self.kinds, self.most_filler).draw() for _ in range(count)]
        return row_batch(rng, rows, length)


STAGES = (
    Stage("all-64", (64,), 200, lists_share=0.3, most_filler=0.2),
    Stage("all-128", (64, 128), 1500, lists_share=0.3),
    Stage("all-256", (128, 256), 250, lists_share=0.25),
    Stage("mixed", (128, 256, 512, 1024), 2000, lists_share=0.35, final_learning_rate=1e-5),
    Stage(
        "long",
        (512, 1024, 2048),
        450,
        kinds=MORE_HOPS,
        lists_share=0.3,
        learning_rate=5e-4,
        final_learning_rate=1e-5,
    ),
    # While it is trained on the losses of both hops, the model forgets to repeat the asked node.
    Stage(
        "repeat",
        (128, 256, 512),
        250,
        lists_share=0.25,
        hops_weight=0.05,
        learning_rate=7e-4,
        final_learning_rate=1e-5,
    ),
)
