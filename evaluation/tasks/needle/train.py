"""Train the bundled needle model from scratch, on one CPU thread or a GPU.

Run as ``python -m kvpolicy.evaluation.tasks.needle.train --out DIR``. A run that was stopped goes
on at its last checkpoint. The stages are in `curriculum`.
"""

import argparse
import contextlib
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from .batches import IGNORED, Batch
from .curriculum import STAGES, Stage
from .export import save_pretrained
from .network import HOP_LAYER, Network
from .task import NeedlePrompt, NeedleTask, exact_match
from .vocabulary import QUERY2

OTHERS_WEIGHT = 0.1
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
    accuracy: dict[str, float] = attrs.field(factory=dict)

    def __str__(self) -> str:
        accuracy = ", ".join(f"{name} {value:.3f}" for name, value in self.accuracy.items())
        name = STAGES[self.stage].name
        return f"{self.minutes:.1f} min, {name} step {self.step}: {accuracy}"

    def record(self, step_accuracy: dict[str, float]) -> None:
        """Fold one step's accuracies into the running ones."""
        for name, value in step_accuracy.items():
            before = self.accuracy.get(name, value)
            self.accuracy[name] = SMOOTHING * before + (1 - SMOOTHING) * value


@contextlib.contextmanager
def forward_pass(network: Network) -> Iterator[None]:
    """Compute in bfloat16, and make what a forward makes on the network's device."""
    device = network.embedding.weight.device
    with device, torch.autocast(device.type, dtype=torch.bfloat16):
        yield


def token_loss(network: Network, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy over the positions with a target, and which were hit."""
    chosen = targets != IGNORED
    logits, wanted = network.logits(hidden[chosen]).float(), targets[chosen]
    return functional.cross_entropy(logits, wanted), logits.argmax(dim=-1) == wanted


def step_loss(
    network: Network, batch: Batch, stage: Stage, blindfolded: bool
) -> tuple[Tensor, dict[str, float]]:
    """Return the loss of one step and the accuracies by kind of question."""
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
    """Return the accuracy over all answer tokens and over the first of each kind of answer."""
    scored = batch.answers != IGNORED
    first = scored.clone()
    first[:, 1:] &= ~scored[:, :-1]
    two_hop = torch.zeros_like(scored)
    two_hop[:, 1:] = batch.input_ids[:, :-1] == QUERY2
    kinds = {"answer": scored, "one-hop": first & ~two_hop, "two-hop": first & two_hop}
    return {
        name: hits[kind[scored]].float().mean().item() for name, kind in kinds.items() if kind.any()
    }


def learning_rate(stage: Any, step: int) -> float:
    """Return the rate of one step: a short linear rise, then constant or a cosine down."""
    rate: float = stage.learning_rate
    if stage.final_learning_rate is not None:
        fall = 0.5 + 0.5 * math.cos(math.pi * step / stage.max_steps)
        rate = stage.final_learning_rate + (rate - stage.final_learning_rate) * fall
    return rate * min(1.0, (step + 1) / WARMUP_STEPS)


class Trainer:
    """The network, its optimiser and the run's progress, kept in ``out/state.pt``.

    Another model's training has other stages, another progress and another `step`.
    """

    stages: Sequence[Any] = STAGES
    progress_type: type[Any] = Progress

    def __init__(self, out: Path, seed: int, device: str = "cpu") -> None:
        torch.manual_seed(seed)
        self.out, self.seed, self.device = out, seed, torch.device(device)
        self.network = self.new_network().to(self.device)
        self.optimizer = torch.optim.Adam(self.network.parameters(), betas=(0.9, 0.98))
        self.progress = self.progress_type()
        self.state_file = out / "state.pt"
        if self.state_file.exists():
            state = torch.load(self.state_file, map_location=self.device)
            self.network.load_state_dict(state["network"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.progress = self.progress_type(**state["progress"])

    def new_network(self) -> Network:
        """The network that a run begins with."""
        return Network()

    def begin(self, stage: Any) -> None:
        """What is done to the network before a stage's first step."""
        if stage.stack:
            self.network.stack_hop_layer()

    def save(self, path: Path) -> None:
        """Write a checkpoint in one move, so that an interrupted run leaves the previous one."""
        partial = path.with_suffix(".partial")
        parts = {"network": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(parts | {"progress": attrs.asdict(self.progress)}, partial)
        partial.replace(path)

    def run(self, minutes: float) -> None:
        """Go through the stages that remain, for at most ``minutes`` in all."""
        while self.progress.stage < len(self.stages) and self.progress.minutes < minutes:
            stage = self.stages[self.progress.stage]
            if self.progress.step == 0:
                self.begin(stage)
            if not self.run_stage(stage, minutes):
                self.save(self.state_file)
                return
            print(f"{self.progress} (end of {stage.name})", file=sys.stderr, flush=True)
            self.progress = self.progress_type(
                stage=self.progress.stage + 1, minutes=self.progress.minutes
            )
            self.save(self.state_file)
            self.save(self.out / f"{stage.name}.pt")

    def run_stage(self, stage: Any, minutes: float) -> bool:
        """Train one stage to its end and return True, or False when the time is up before."""
        progress = self.progress
        rng = random.Random(f"{self.seed}/{stage.name}/{progress.step}")
        while progress.minutes < minutes:
            begin = time.monotonic()
            progress.record(self.step(stage, rng))
            progress.minutes += (time.monotonic() - begin) / 60
            progress.step += 1
            if progress.step % CHECKPOINT_STEPS == 0:
                self.save(self.state_file)
                print(progress, file=sys.stderr, flush=True)
            reached = progress.step >= MIN_STEPS and min(progress.accuracy.values()) >= stage.target
            if reached or progress.step >= stage.max_steps:
                return True
        return False

    def drawn(self, stage: Any, rng: random.Random) -> Any:
        """A stage's next batch, on the device; rows are written on the CPU."""
        batch = stage.draw(rng)
        fields = {each.name: getattr(batch, each.name) for each in attrs.fields(type(batch))}
        return type(batch)(**{name: value.to(self.device) for name, value in fields.items()})

    def step(self, stage: Any, rng: random.Random) -> Any:
        """Take one optimiser step and return what the progress records: its accuracies."""
        batch = self.drawn(stage, rng)
        loss, accuracies = step_loss(self.network, batch, stage, rng.random() < stage.blindfold)
        self.descend(stage, loss)
        return accuracies

    def descend(self, stage: Any, loss: Tensor) -> None:
        """Change the network along the gradient of a step's loss, at the stage's learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(stage, self.progress.step)
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()


@torch.no_grad()
def answered(model: LlamaForCausalLM, prompts: Sequence[NeedlePrompt]) -> float:
    """Return the share of prompts whose greedy continuation is the answer."""
    hits = 0
    for prompt in prompts:
        ids = torch.tensor([prompt.input_ids])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=len(prompt.answer)
        )
        hits += exact_match(output[0, ids.shape[1] :].tolist(), prompt.answer)
    return hits / len(prompts)


def training_parser(description: str) -> argparse.ArgumentParser:
    """The options of every training: ``--out``, ``--minutes``, ``--seed`` and ``--device``."""
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


def main() -> None:
    """Train, write the model and its tokenizer, and print how often it answers."""
    arguments = training_parser("Train the needle model.").parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(arguments.out, arguments.seed, arguments.device)
    trainer.run(arguments.minutes)
    save_pretrained(trainer.network.cpu(), arguments.out / "weights")
    model = LlamaForCausalLM.from_pretrained(arguments.out / "weights", dtype=torch.float32)
    for context_len in (512, 1024, 2048):
        for hops in (1, 2):
            share = answered(model, NeedleTask(context_len, hops).prompts(200, seed=1))
            print(f"{context_len} tokens, {hops} hop(s): exact match {share:.3f}")


if __name__ == "__main__":
    main()
