"""Train the bundled needle model from scratch, on one CPU thread or a GPU.

Run as ``python -m training.needle.train --out DIR``. A run that was stopped continues from its last
checkpoint. The stages are in `curriculum`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from kvpolicy.evaluation.tasks.needle.task import NeedlePrompt, NeedleTask, exact_match
from kvpolicy.evaluation.tasks.needle.vocabulary import QUERY2
from training import trainer
from training.batches import IGNORED
from training.network import HOP_LAYER, Network
from training.trainer import forward_pass, token_loss

from .batches import Batch
from .curriculum import STAGES, Stage

OTHERS_WEIGHT = 0.1


def step_loss(
    network: Network, batch: Batch, stage: Stage, blindfolded: bool
) -> tuple[Tensor, dict[str, float]]:
    """Return the loss of one batch and its accuracies, over all answers and by kind of question."""
    blind = (batch.in_questions, batch.in_pairs) if blindfolded else None
    with forward_pass(network):
        states = network(batch.input_ids, batch.positions, blind)
    loss, hits = token_loss(network, states[-1], batch.answers)
    if (batch.others != IGNORED).any():
        loss = loss + OTHERS_WEIGHT * token_loss(network, states[-1], batch.others)[0]
    if stage.supervision and (batch.bridges != IGNORED).any():
        bridge_loss, _ = token_loss(network, states[HOP_LAYER], batch.bridges)
        early_loss, _ = token_loss(network, states[HOP_LAYER + 1], batch.answers)
        loss = loss + stage.supervision * (bridge_loss + early_loss)
    return loss, _accuracies(batch, hits)


def _accuracies(batch: Batch, hits: Tensor) -> dict[str, float]:
    """Return the accuracy over all answer tokens, and over first answer tokens by question kind."""
    scored = batch.answers != IGNORED
    first = scored.clone()
    first[:, 1:] &= ~scored[:, :-1]
    two_hop = torch.zeros_like(scored)
    two_hop[:, 1:] = batch.input_ids[:, :-1] == QUERY2
    kinds = {"answer": scored, "one-hop": first & ~two_hop, "two-hop": first & two_hop}
    return {
        name: hits[kind[scored]].float().mean().item() for name, kind in kinds.items() if kind.any()
    }


class Trainer(trainer.Trainer):
    """A trainer of the needle model."""

    stages = STAGES

    def new_network(self) -> Network:
        """Return an untrained network."""
        return Network()

    def loss(
        self, batch: Batch, stage: Stage, rng: random.Random
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of one batch, with the blindfold in some steps, and its accuracies."""
        return step_loss(self.network, batch, stage, rng.random() < stage.blindfold)


@torch.no_grad()
def answered(model: LlamaForCausalLM, prompts: Sequence[NeedlePrompt]) -> float:
    """Return the fraction of prompts whose greedy continuation starts with the answer."""
    hits = 0
    for prompt in prompts:
        ids = torch.tensor([prompt.input_ids])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=len(prompt.answer)
        )
        hits += exact_match(output[0, ids.shape[1] :].tolist(), prompt.answer)
    return hits / len(prompts)


def main() -> None:
    """Train the model, save it with its tokenizer, and print its accuracy."""
    options = trainer.training_parser("Train the needle model.").parse_args()
    model = trainer.trained(Trainer, options)
    for context_len in (512, 1024, 2048):
        for hops in (1, 2):
            share = answered(model, NeedleTask(context_len, hops).prompts(200, seed=1))
            print(f"{context_len} tokens, {hops} hop(s): exact match {share:.3f}")


if __name__ == "__main__":
    main()
