"""Runs a training: options, stages, optimiser steps and checkpoints, for all three models."""

from __future__ import annotations

import abc
import argparse
import contextlib
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from .batches import IGNORED
from .export import save_pretrained
from .network import Network

WARMUP_STEPS = 50
SMOOTHING = 0.95
MIN_STEPS = 30
CHECKPOINT_STEPS = 100


@attrs.frozen
class Stage(abc.ABC):
    """One stage of a training, with rows of one kind.

    A stage ends when the running accuracy of every kind of question reaches ``target``, or after
    ``max_steps``. The learning rate is ``learning_rate`` throughout, or falls along a cosine to
    ``final_learning_rate`` over ``max_steps``.

    Args:
        name: also the name of the stage's checkpoint.
        lengths: row lengths in tokens, one drawn for each step.
        max_steps: the most steps the stage takes.
        target: running accuracy over single answer tokens at which the stage ends; above 1 it never
            ends by it.
        learning_rate: Adam's.
        final_learning_rate: None for a constant rate.
        stack: whether the stage starts by copying the retrieval layer one layer up.
    """

    name: str
    lengths: tuple[int, ...]
    max_steps: int
    target: float = 2.0
    learning_rate: float = 1e-3
    final_learning_rate: float | None = None
    stack: bool = False

    @abc.abstractmethod
    def draw(self, rng: random.Random) -> Any:
        """Draw the batch of one step."""

    def rate_of(self, step: int) -> float:
        """Return the learning rate of one step; it rises linearly over the first steps."""
        rate = self.learning_rate
        if self.final_learning_rate is not None:
            fall = 0.5 + 0.5 * math.cos(math.pi * step / self.max_steps)
            rate = self.final_learning_rate + (rate - self.final_learning_rate) * fall
        return rate * min(1.0, (step + 1) / WARMUP_STEPS)


@attrs.define
class Progress:
    """The progress of a run: stage, step, minutes, running loss and accuracies."""

    stage: int = 0
    step: int = 0
    minutes: float = 0.0
    loss: float = 0.0
    accuracy: dict[str, float] = attrs.field(factory=dict)

    def __str__(self) -> str:
        accuracy = ", ".join(f"{name} {value:.4f}" for name, value in self.accuracy.items())
        return f"{self.minutes:.1f} min, step {self.step}: loss {self.loss:.2f}, {accuracy}"

    def record(self, loss: float, accuracy: dict[str, float]) -> None:
        """Update the running loss and accuracies with one step's values."""
        self.loss = SMOOTHING * (self.loss or loss) + (1 - SMOOTHING) * loss
        for name, value in accuracy.items():
            before = self.accuracy.get(name, value)
            self.accuracy[name] = SMOOTHING * before + (1 - SMOOTHING) * value


@contextlib.contextmanager
def forward_pass(network: Network) -> Iterator[None]:
    """Run the block in bfloat16 autocast, with new tensors on the network's device."""
    device = network.embedding.weight.device
    with device, torch.autocast(device.type, dtype=torch.bfloat16):
        yield


def token_loss(network: Network, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy over positions with a target, and which are predicted right."""
    chosen = targets != IGNORED
    logits, wanted = network.logits(hidden[chosen]).float(), targets[chosen]
    return functional.cross_entropy(logits, wanted), logits.argmax(dim=-1) == wanted


class Trainer(abc.ABC):
    """The network, its optimiser and the run's progress, which are saved in ``out/state.pt``.

    A subclass for one model defines ``stages``, `new_network` and `loss`.

    Args:
        out: folder of the checkpoints; if it has one, the run continues from it.
        seed: of the weights and of the rows.
        device: of the network.
    """

    stages: ClassVar[Sequence[Any]] = ()

    def __init__(self, out: Path, seed: int, device: str = "cpu") -> None:
        torch.manual_seed(seed)
        self.out, self.seed, self.device = out, seed, torch.device(device)
        self.network = self.new_network().to(self.device)
        self.optimizer = torch.optim.Adam(self.network.parameters(), betas=(0.9, 0.98))
        self.progress = Progress()
        self.state_file = out / "state.pt"
        if self.state_file.exists():
            state = torch.load(self.state_file, map_location=self.device)
            self.network.load_state_dict(state["network"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.progress = Progress(**state["progress"])

    @abc.abstractmethod
    def new_network(self) -> Network:
        """Return the network that a run starts with."""

    @abc.abstractmethod
    def loss(self, batch: Any, stage: Any, rng: random.Random) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of one step and its accuracies by kind of question."""

    def begin(self, stage: Stage) -> None:
        """Copy the hop layer one layer up before a stage's first step, if the stage needs it."""
        if stage.stack:
            self.network.stack_hop_layer()

    def save(self, path: Path) -> None:
        """Write a checkpoint, so that an interrupted write keeps the old one."""
        partial = path.with_suffix(".partial")
        parts = {"network": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(parts | {"progress": attrs.asdict(self.progress)}, partial)
        partial.replace(path)

    def run(self, minutes: float) -> None:
        """Train all remaining stages, until the run has taken ``minutes`` in total."""
        while self.progress.stage < len(self.stages) and self.progress.minutes < minutes:
            stage = self.stages[self.progress.stage]
            if self.progress.step == 0:
                self.begin(stage)
            if not self.run_stage(stage, minutes):
                self.save(self.state_file)
                return
            print(f"end of {stage.name}: {self.progress}", file=sys.stderr, flush=True)
            self.progress = Progress(stage=self.progress.stage + 1, minutes=self.progress.minutes)
            self.save(self.state_file)
            self.save(self.out / f"{stage.name}.pt")

    def run_stage(self, stage: Stage, minutes: float) -> bool:
        """Train one stage; return True when it is finished, False if time ran out first."""
        progress = self.progress
        rng = random.Random(f"{self.seed}/{stage.name}/{progress.step}")
        while progress.minutes < minutes:
            begin = time.monotonic()
            progress.record(*self.step(stage, rng))
            progress.minutes += (time.monotonic() - begin) / 60
            progress.step += 1
            if progress.step % CHECKPOINT_STEPS == 0:
                self.save(self.state_file)
                print(f"{stage.name}: {progress}", file=sys.stderr, flush=True)
            reached = progress.step >= MIN_STEPS and min(progress.accuracy.values()) >= stage.target
            if reached or progress.step >= stage.max_steps:
                return True
        return False

    def step(self, stage: Stage, rng: random.Random) -> tuple[float, dict[str, float]]:
        """Take one optimiser step and return its loss and accuracies."""
        loss, accuracy = self.loss(self.drawn(stage, rng), stage, rng)
        for group in self.optimizer.param_groups:
            group["lr"] = stage.rate_of(self.progress.step)
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        return loss.item(), accuracy

    def drawn(self, stage: Stage, rng: random.Random) -> Any:
        """Draw a stage's next batch on the CPU and copy it to the network's device."""
        batch = stage.draw(rng)
        fields = {each.name: getattr(batch, each.name) for each in attrs.fields(type(batch))}
        return type(batch)(**{name: value.to(self.device) for name, value in fields.items()})


def training_parser(description: str) -> argparse.ArgumentParser:
    """Return an argparse parser with the options of every training."""
    parser = argparse.ArgumentParser(description=description)
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
    parser.add_argument("--device", default="cpu", help="cpu by default, or cuda")
    return parser


def trained(
    trainer_type: type[Trainer], options: argparse.Namespace, names: Sequence[str] | None = None
) -> LlamaForCausalLM:
    """Train, save the model and its tokenizer to ``out/weights``, and return the saved model.

    Args:
        trainer_type: the model's training.
        options: those of `training_parser`.
        names: the tokens' texts; the needle language's by default.
    """
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    trainer = trainer_type(options.out, options.seed, options.device)
    trainer.run(options.minutes)
    save_pretrained(trainer.network.cpu(), options.out / "weights", names)
    return LlamaForCausalLM.from_pretrained(options.out / "weights", dtype=torch.float32)
