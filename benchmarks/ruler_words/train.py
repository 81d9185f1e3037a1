"""Train the bundled model of word tasks, on one CPU thread or a GPU.

Run as ``python -m benchmarks.ruler_words.train --out DIR``. A run that was stopped goes on at its
last checkpoint. The stages are in `curriculum`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from kvpolicy.evaluation.tasks.needle import train as needle
from kvpolicy.evaluation.tasks.needle.export import save_pretrained
from kvpolicy.evaluation.tasks.needle.network import HOP_LAYER, Network
from kvpolicy.evaluation.tasks.ruler_words.questions import KINDS
from kvpolicy.evaluation.tasks.ruler_words.vocabulary import token_names

from .batches import NONE, Batch
from .curriculum import STAGES, Stage
from .start import started_network

OTHERS_WEIGHT = 0.01
SMOOTHING = 0.95


@attrs.define
class Progress:
    """Where a run stands: enough to take it up again at the last checkpoint."""

    stage: int = 0
    step: int = 0
    minutes: float = 0.0
    loss: float = 0.0
    accuracy: dict[str, float] = attrs.field(factory=dict)

    def __str__(self) -> str:
        accuracy = ", ".join(f"{name} {value:.3f}" for name, value in self.accuracy.items())
        name = STAGES[self.stage].name
        return f"{self.minutes:.1f} min, {name} step {self.step}: loss {self.loss:.2f}, {accuracy}"

    def record(self, step: tuple[float, dict[str, float]]) -> None:
        """Fold one step's loss and accuracies into the running ones."""
        loss, step_accuracy = step
        self.loss = SMOOTHING * (self.loss or loss) + (1 - SMOOTHING) * loss
        for name, value in step_accuracy.items():
            before = self.accuracy.get(name, value)
            self.accuracy[name] = SMOOTHING * before + (1 - SMOOTHING) * value


def step_loss(
    network: Network, batch: Batch, *, blindfolded: bool = False, hops_weight: float = 0.0
) -> tuple[Tensor, dict[str, float]]:
    """Return the loss of one step and the accuracy by kind, over the words that count.

    Args:
        network: the network.
        batch: the step's rows.
        blindfolded: whether questions do not see names up to the first hop's layer.
        hops_weight: of the losses that read both hops off the lower layers.
    """
    blindfold = (batch.in_questions, batch.in_names) if blindfolded else None
    with needle.forward_pass(network):
        states = network(batch.input_ids, batch.positions, blindfold)
    hidden = states[-1]
    asked = batch.answers != NONE
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
        if kind != NONE
    }
    loss = loss + OTHERS_WEIGHT * _others_loss(network, hidden, batch, asked)
    return loss + hops_weight * _hops_loss(network, states, batch), accuracy


def _hops_loss(network: Network, states: Sequence[Tensor], batch: Batch) -> Tensor:
    """Ask the two layers of a two-hop question for what they are to find, when it is read."""
    asked = batch.hops[..., 0] != NONE
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


class Trainer(needle.Trainer):
    """As of the needle model, which it begins from, with stages and a loss of its own."""

    stages = STAGES
    progress_type = Progress

    def new_network(self) -> Network:
        """The needle model's layers under new embeddings."""
        return started_network()

    def begin(self, stage: Stage) -> None:
        """Nothing: all layers are there from the start."""

    def step(self, stage: Stage, rng: random.Random) -> tuple[float, dict[str, float]]:
        """Take one optimiser step and return its loss and accuracies."""
        loss, accuracy = step_loss(
            self.network,
            self.drawn(stage, rng),
            blindfolded=rng.random() < stage.blindfold,
            hops_weight=stage.hops_weight,
        )
        self.descend(stage, loss)
        return loss.item(), accuracy


def main() -> None:
    """Train, and write the model and its tokenizer."""
    arguments = needle.training_parser("Train the model of word tasks.").parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(arguments.out, arguments.seed, arguments.device)
    trainer.run(arguments.minutes)
    save_pretrained(trainer.network.cpu(), arguments.out / "weights", token_names())


if __name__ == "__main__":
    main()
