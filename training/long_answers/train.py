"""Train the bundled model with long answers from scratch, on one CPU thread or a GPU.

Run as ``python -m training.long_answers.train --out DIR``. A run that was stopped continues from
its last checkpoint. The stages are in `curriculum`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import fmean

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from kvpolicy.evaluation.tasks.long_answers.task import (
    KINDS,
    LongAnswerTask,
    LongPrompt,
    right_steps,
)
from kvpolicy.evaluation.tasks.long_answers.vocabulary import ARROW, token_names
from training import trainer
from training.batches import IGNORED
from training.needle.batches import Batch
from training.network import HOP_LAYER, Network, NetworkShape
from training.trainer import forward_pass, token_loss

from .batches import MAX_POSITION
from .curriculum import STAGES, Stage

LENGTHS = (256, 512)
SHAPE = NetworkShape(num_layers=4, max_position=MAX_POSITION)


def step_loss(
    network: Network, batch: Batch, supervision: float = 0.0
) -> tuple[Tensor, dict[str, float]]:
    """Return the loss over a batch's answers, and the accuracy of all tokens and of lookups.

    Args:
        network: the network.
        batch: the step's rows.
        supervision: weight of the losses that read symbol and answer off the lower layers.
    """
    with forward_pass(network):
        states = network(batch.input_ids, batch.positions)
    loss, hits = token_loss(network, states[-1], batch.answers)
    if supervision:
        bridge_loss, _ = token_loss(network, states[HOP_LAYER], batch.bridges)
        early_loss, _ = token_loss(network, states[HOP_LAYER + 1], batch.answers)
        loss = loss + supervision * (bridge_loss + early_loss)
    accuracy = {"answer": hits.float().mean().item()}
    lookups = (batch.input_ids == ARROW)[batch.answers != IGNORED]
    if lookups.any():
        accuracy["lookup"] = hits[lookups].float().mean().item()
    return loss, accuracy


class Trainer(trainer.Trainer):
    """A trainer of the model with long answers."""

    stages = STAGES

    def new_network(self) -> Network:
        """Return an untrained network."""
        return Network(SHAPE)

    def loss(
        self, batch: Batch, stage: Stage, rng: random.Random
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of one batch and its accuracies."""
        return step_loss(self.network, batch, stage.supervision)


@torch.no_grad()
def answered(model: LlamaForCausalLM, prompts: Sequence[LongPrompt]) -> tuple[float, float]:
    """Return the fraction of exact answers, and the mean fraction of right steps."""
    ids = torch.tensor([prompt.input_ids for prompt in prompts])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=len(prompts[0].answer)
    )
    shares = [
        right_steps(row, prompt.answer)
        for row, prompt in zip(output[:, ids.shape[1] :].tolist(), prompts, strict=True)
    ]
    return fmean(share == 1.0 for share in shares), fmean(shares)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the model, save it with its tokenizer, and print its accuracy."""
    parser = trainer.training_parser("Train the model with long answers.")
    parser.add_argument("--count", type=int, default=32, help="prompts of each kind at the end")
    options = parser.parse_args(arguments)
    model = trainer.trained(Trainer, options, token_names())
    for context_len in LENGTHS:
        for kind in KINDS:
            prompts = LongAnswerTask(kind, context_len).prompts(options.count, seed=1)
            exact, steps = answered(model, prompts)
            print(f"{context_len} tokens, {kind}: exact match {exact:.3f}, steps {steps:.3f}")


if __name__ == "__main__":
    main()
