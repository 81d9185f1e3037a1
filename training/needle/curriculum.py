"""The stages of the training, from copying to long two-hop needles.

Copying comes first, because it brings the induction heads that every later stage builds on. Needles
then get longer, and links are added. Two devices keep the second hop in the layer above the first.
One is a pair of losses, which read the bridge off the lower layer and the answer off the upper one.
The other is the blindfold: steps in which the question sees no pair up to the first hop's layer. In
a trial without the blindfold, one-hop answers were lost once the cache was compressed (at 256
tokens with 20% kept, accuracy was 0.43, against 0.90 with the full cache). A possible reason is
that the question attended to its pair in one layer only, and the answer's later tokens were read in
another.

The bundled weights took 33 minutes on one thread of a shared machine of two cores, 5,070 steps of
4,096 tokens:

============  =====  =======
stage         steps  minutes
============  =====  =======
copy            753      4.1
needle-64       216      1.5
needle-96        30      0.1
needle-128       30      0.2
needle-256       82      0.5
two-hop-64      469      1.8
two-hop-96      420      1.5
two-hop-128     294      1.5
two-hop-256     724      4.0
two-hop-512     552      3.3
mixed          1500     14.8
============  =====  =======
"""

import random

import attrs

from kvpolicy.evaluation.tasks.needle.task import MAX_PAIRS
from training import trainer
from training.batches import TOKENS_PER_STEP

from .batches import Batch, copy_batch, needle_batch
from .rows import RowPlan


@attrs.frozen
class Stage(trainer.Stage):
    """One stage of the needle model's training.

    Args:
        pairs: fewest and most pairs of a row; None for copy rows.
        num_values: values of a pair.
        two_hop_share: share of two-hop questions; above 0 rows hold links.
        links_first: see `RowPlan`.
        supervision: weight of the losses that read the bridge and the answer off the lower layers.
        blindfold: share of the steps in which questions do not see the pairs in the lower layers.
    """

    pairs: tuple[int, int] | None = None
    num_values: int = 3
    two_hop_share: float = 0.0
    links_first: bool = False
    supervision: float = 0.0
    blindfold: float = 0.0

    def draw(self, rng: random.Random) -> Batch:
        """Draw the batch of one step."""
        length = rng.choice(self.lengths)
        if self.pairs is None:
            return copy_batch(rng, length)
        return needle_batch(
            rng, [self._plan(rng, length, *self.pairs) for _ in range(TOKENS_PER_STEP // length)]
        )

    def _plan(self, rng: random.Random, length: int, fewest: int, most: int) -> RowPlan:
        # A pair and its link take nine tokens; the rest is left for questions and filler.
        num_pairs = rng.randint(fewest, min(most, MAX_PAIRS, length // 12))
        has_links = self.two_hop_share > 0
        return RowPlan(
            length, num_pairs, has_links, self.num_values, self.two_hop_share, self.links_first
        )


TWO_HOP = Stage("two-hop", (), 3000, 0.95, two_hop_share=0.5, supervision=1.0)
STAGES = (
    Stage("copy", (48,), 3000, 0.90),
    Stage("needle-64", (64,), 3000, 0.95, pairs=(4, 4)),
    Stage("needle-96", (96,), 3000, 0.95, pairs=(4, 8)),
    Stage("needle-128", (128,), 3000, 0.95, pairs=(4, 12)),
    Stage("needle-256", (256,), 3000, 0.96, pairs=(8, 16)),
    attrs.evolve(
        TWO_HOP,
        name="two-hop-64",
        lengths=(64,),
        pairs=(3, 4),
        num_values=1,
        links_first=True,
        stack=True,
        blindfold=1.0,
    ),
    attrs.evolve(
        TWO_HOP, name="two-hop-96", lengths=(96,), pairs=(3, 6), links_first=True, blindfold=1.0
    ),
    attrs.evolve(TWO_HOP, name="two-hop-128", lengths=(128,), pairs=(3, 8), blindfold=0.7),
    attrs.evolve(
        TWO_HOP, name="two-hop-256", lengths=(256,), pairs=(4, 16), target=0.96, blindfold=0.5
    ),
    attrs.evolve(
        TWO_HOP, name="two-hop-512", lengths=(512,), pairs=(8, 24), target=0.97, blindfold=0.5
    ),
    attrs.evolve(
        TWO_HOP,
        name="mixed",
        lengths=(128, 256, 512, 1024, 2048, 4096),
        max_steps=1500,
        pairs=(4, 25),
        target=2.0,
        blindfold=0.5,
        final_learning_rate=1e-5,
    ),
)
