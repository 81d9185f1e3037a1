"""The stages of the training, from short rows of lookups to long documents of every kind."""

from __future__ import annotations

import random

import attrs

from .batches import TOKENS_PER_STEP, Batch, row_batch
from .rows import NamesRow, list_row

LOOKUPS = ("single", "multi-query", "multi-query", "two-hop", "tracing")
MORE_HOPS = ("multi-query", "two-hop", "two-hop", "two-hop", "tracing")


@attrs.frozen
class Stage:
    """A stretch of the training.

    A stage ends when the running accuracy of every kind reaches ``target``, or after ``max_steps``.
    The learning rate is constant, or falls along a cosine over ``max_steps``.

    Args:
        name: also the name of the stage's checkpoint.
        lengths: row lengths in tokens, one drawn for each step.
        max_steps: the most steps the stage takes.
        target: running accuracy at which the stage ends; above 1 it never does.
        kinds: of the lookups in a row.
        lists_share: share of the steps whose rows ask for common and frequent words.
        most_filler: the most filler of a row, as a fraction of it.
        blindfold: share of the steps in which questions do not see names in the lower layers.
        hops_weight: weight of the losses that read both hops off the lower layers.
        learning_rate: Adam's.
        final_learning_rate: None for a constant rate.
    """

    name: str
    lengths: tuple[int, ...]
    max_steps: int
    target: float = 2.0
    kinds: tuple[str, ...] = LOOKUPS
    lists_share: float = 0.15
    most_filler: float = 0.5
    blindfold: float = 0.5
    hops_weight: float = 1.0
    learning_rate: float = 1e-3
    final_learning_rate: float | None = None

    def draw(self, rng: random.Random) -> Batch:
        """Return the batch of one step."""
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
    # Under the losses of both hops the model forgets to repeat the node that was asked for.
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
