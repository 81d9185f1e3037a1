"""Train the bundled model of word tasks, on one CPU thread or a GPU.

Run as ``python -m training.ruler_words.train --out DIR``. A run that was stopped continues from its
last checkpoint. The stages are in `curriculum`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional

from kvpolicy.evaluation.tasks.ruler_words.questions import KINDS
from kvpolicy.evaluation.tasks.ruler_words.vocabulary import token_names
from training import trainer
from training.batches import IGNORED
from training.network import HOP_LAYER, Network
from training.trainer import forward_pass

from .batches import Batch
from .curriculum import STAGES, Stage
from .start import started_network

OTHERS_WEIGHT = 0.01


def step_loss(
    network: Network, batch: Batch, *, blindfolded: bool = False, hops_weight: float = 0.0
) -> tuple[Tensor, dict[str, float]]:
    """Return the loss of one batch, and the accuracy by kind over the scored words.

    Args:
        network: the network.
        batch: the step's rows.
        blindfolded: whether questions do not see names up to the first hop's layer.
        hops_weight: weight of the losses that read both hops off the lower layers.
    """
    blindfold = (batch.in_questions, batch.in_names) if blindfolded else None
    with forward_pass(network):
        states = network(batch.input_ids, batch.positions, blindfold)
    hidden = states[-1]
    asked = batch.answers != IGNORED
    logits, answers, kinds = (
        network.logits(hidden[asked]).float(),
        batch.answers[asked],
        batch.kinds[asked],
    )
    loss = functional.cross_entropy(logits, answers)
    hits = logits.argmax(dim=1) == answers
    accuracy = {
        KINDS[kind]: hits[kinds == kind].float().mean().item()
        for kind in kinds.unique().tolist()
        if kind != IGNORED
    }
    loss = loss + OTHERS_WEIGHT * _others_loss(network, hidden, batch, asked)
    return loss + hops_weight * _hops_loss(network, states, batch), accuracy


def _hops_loss(network: Network, states: Sequence[Tensor], batch: Batch) -> Tensor:
    """Return the loss of the two hop layers: one must predict the key, the next one the name."""
    asked = batch.hops[..., 0] != IGNORED
    if not asked.any():
        return states[-1].new_zeros(())
    losses = [
        functional.cross_entropy(network.logits(state[asked]).float(), batch.hops[asked][:, hop])
        for hop, state in enumerate(states[HOP_LAYER : HOP_LAYER + 2])
    ]
    return losses[0] + losses[1]


def _others_loss(network: Network, hidden: Tensor, batch: Batch, asked: Tensor) -> Tensor:
    others = ~asked[:, :-1]
    logits = network.logits(hidden[:, :-1][others]).float()
    return functional.cross_entropy(logits, batch.input_ids[:, 1:][others])


class Trainer(trainer.Trainer):
    """A trainer of the word tasks' model, which has all of its layers from the start."""

    stages = STAGES

    def new_network(self) -> Network:
        """Return the needle model's layers with new embeddings."""
        return started_network()

    def loss(
        self, batch: Batch, stage: Stage, rng: random.Random
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of one batch, with the blindfold in some steps, and its accuracies."""
        return step_loss(
            self.network,
            batch,
            blindfolded=rng.random() < stage.blindfold,
            hops_weight=stage.hops_weight,
        )


def main() -> None:
    """Train the model, and save it with its tokenizer."""
    options = trainer.training_parser("Train the model of word tasks.").parse_args()
    trainer.trained(Trainer, options, token_names())


if __name__ == "__main__":
    main()
