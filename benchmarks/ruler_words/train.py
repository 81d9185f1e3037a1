"""Train the bundled model of word tasks, on one CPU thread.

Run as ``python -m benchmarks.ruler_words.train --out DIR``. A run that was stopped goes on at its
last checkpoint. The stages are in `curriculum`.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import attrs
import torch
from torch import Tensor
from torch.nn import functional

from kvpolicy.evaluation.tasks.needle.export import save_pretrained
from kvpolicy.evaluation.tasks.needle.network import HOP_LAYER, Network
from kvpolicy.evaluation.tasks.ruler_words.questions import KINDS
from kvpolicy.evaluation.tasks.ruler_words.vocabulary import token_names

from .batches import NONE, Batch
from .curriculum import STAGES, Stage
from .start import started_network

OTHERS_WEIGHT = 0.01
WARMUP_STEPS = 50
SMOOTHING = 0.95
MIN_STEPS = 30
CHECKPOINT_STEPS = 100


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

    def record(self, loss: float, step_accuracy: dict[str, float]) -> None:
        """Fold one step's loss and accuracies into the running ones."""
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
    with torch.autocast("cpu", dtype=torch.bfloat16):
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
        return torch.zeros(())
    losses = [
        functional.cross_entropy(network.logits(state[asked]).float(), batch.hops[asked][:, hop])
        for hop, state in enumerate(states[HOP_LAYER : HOP_LAYER + 2])
    ]
    return losses[0] + losses[1]


def _others_loss(network: Network, hidden: Tensor, batch: Batch, asked: Tensor) -> Tensor:
    others = ~asked[:, :-1]
    logits = network.logits(hidden[:, :-1][others]).float()
    return functional.cross_entropy(logits, batch.input_ids[:, 1:][others])


def learning_rate(stage: Stage, step: int) -> float:
    """Return the rate of one step: a short linear rise, then constant or a cosine down."""
    rate = stage.learning_rate
    if stage.final_learning_rate is not None:
        fall = 0.5 + 0.5 * math.cos(math.pi * step / stage.max_steps)
        rate = stage.final_learning_rate + (rate - stage.final_learning_rate) * fall
    return rate * min(1.0, (step + 1) / WARMUP_STEPS)


class Trainer:
    """The network, its optimiser and the run's progress, kept in ``out/state.pt``."""

    def __init__(self, out: Path, seed: int) -> None:
        torch.manual_seed(seed)
        self.out, self.seed = out, seed
        self.network = started_network()
        self.optimizer = torch.optim.Adam(self.network.parameters(), betas=(0.9, 0.98))
        self.progress = Progress()
        self.state_file = out / "state.pt"
        if self.state_file.exists():
            state = torch.load(self.state_file)
            self.network.load_state_dict(state["network"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.progress = Progress(**state["progress"])

    def save(self, path: Path) -> None:
        """Write a checkpoint in one move, so that an interrupted run leaves the previous one."""
        partial = path.with_suffix(".partial")
        parts = {"network": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(parts | {"progress": attrs.asdict(self.progress)}, partial)
        partial.replace(path)

    def run(self, minutes: float) -> None:
        """Go through the stages that remain, for at most ``minutes`` in all."""
        while self.progress.stage < len(STAGES) and self.progress.minutes < minutes:
            stage = STAGES[self.progress.stage]
            if not self.run_stage(stage, minutes):
                self.save(self.state_file)
                return
            print(f"{self.progress} (end of {stage.name})", file=sys.stderr, flush=True)
            self.progress = Progress(stage=self.progress.stage + 1, minutes=self.progress.minutes)
            self.save(self.state_file)
            self.save(self.out / f"{stage.name}.pt")

    def run_stage(self, stage: Stage, minutes: float) -> bool:
        """Train one stage to its end and return True, or False when the time is up before."""
        progress = self.progress
        rng = random.Random(f"{self.seed}/{stage.name}/{progress.step}")
        while progress.minutes < minutes:
            begin = time.monotonic()
            progress.record(*self.step(stage, rng))
            progress.minutes += (time.monotonic() - begin) / 60
            progress.step += 1
            if progress.step % CHECKPOINT_STEPS == 0:
                self.save(self.state_file)
                print(progress, file=sys.stderr, flush=True)
            reached = progress.step >= MIN_STEPS and min(progress.accuracy.values()) >= stage.target
            if reached or progress.step >= stage.max_steps:
                return True
        return False

    def step(self, stage: Stage, rng: random.Random) -> tuple[float, dict[str, float]]:
        """Take one optimiser step and return its loss and accuracies."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(stage, self.progress.step)
        loss, accuracy = step_loss(
            self.network,
            stage.draw(rng),
            blindfolded=rng.random() < stage.blindfold,
            hops_weight=stage.hops_weight,
        )
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        return loss.item(), accuracy


def main() -> None:
    """Train, and write the model and its tokenizer."""
    parser = argparse.ArgumentParser(description="Train the model of word tasks.")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="folder for checkpoints and weights; a started run goes on",
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="stop after this much training"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(arguments.out, arguments.seed)
    trainer.run(arguments.minutes)
    save_pretrained(trainer.network, arguments.out / "weights", token_names())


if __name__ == "__main__":
    main()
