"""Conversations with images through `generate`, and the same rows by the slow reference."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.surface import CACHE
from tests.reference.vision import Outcome, VisionMethod, read

from .models import VisionFamily
from .prompts import Part, model_inputs, reference_row, tokens_of

ANSWER = 8


@dataclass
class Turn:
    """One call of `generate`."""

    tokens: Tensor  # `[batch, ANSWER]`, what was said; the last has not been read
    logits: Tensor  # `[batch, ANSWER, vocab]`
    # Per row, layer and KV head the positions kept at the prompt's end; None from a cache without a
    # policy.
    kept: list[list[list[list[int]]]] | None
    # Per row, by layer that dropped the positions that went on.
    passed: list[dict[int, list[int]]] | None


@dataclass
class Talk:
    """A batch of rows over one or more turns."""

    rows: list[list[Part]]
    turns: list[Turn]


def converse(
    family: VisionFamily, model: PreTrainedModel, store: Any, prompts: Sequence[Sequence[Part]]
) -> Talk:
    """Reads every row's prompts one after another, each with all that was said before."""
    talk = Talk([[] for _ in prompts], [])
    for number in range(len(prompts[0])):
        for row, own in zip(talk.rows, prompts, strict=True):
            row.append(own[number])
        inputs = model_inputs(family, talk.rows, last=1)
        width = inputs["input_ids"].shape[1]
        output = model.generate(
            **inputs,
            **{CACHE: store},
            max_new_tokens=ANSWER,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        said = output.sequences[:, width:]
        logits = torch.stack(output.logits, dim=1)
        mine = isinstance(store, PolicyCache)
        kept = [kept_of(store, row) for row in range(len(prompts))] if mine else None
        passed = [passed_of(store, row) for row in range(len(prompts))] if mine else None
        talk.turns.append(Turn(said, logits, kept, passed))
        for row, answer in zip(talk.rows, said.tolist(), strict=True):
            row.append(answer)
    return talk


def kept_of(store: PolicyCache, row: int) -> list[list[list[int]]]:
    """Per layer and KV head the positions kept at the end of the prompt before the answer."""
    kept = []
    for layer in store.layers:
        held = layer.positions[row, :, : layer.kept_len - (ANSWER - 1)]
        kept.append([[at for at in head if at >= 0] for head in held.tolist()])
    return kept


def passed_of(store: PolicyCache, row: int) -> dict[int, list[int]]:
    """By layer that dropped, the positions that went on."""
    return {
        layer: [at for at in positions[row].tolist() if at >= 0]
        for layer, positions in store.propagated.items()
    }


def by_reference(
    family: VisionFamily, model: PreTrainedModel, row: Sequence[Part], method: VisionMethod
) -> tuple[Outcome, list[Tensor]]:
    """A row of prompts and answers in turn, dense.

    Args:
        family: of the model.
        model: with eager attention.
        row: prompts and answers in turn, the last answer included.
        method: chooses at the end of each prompt.

    Returns:
        What the loop gave, and of each turn the logits `[ANSWER, vocab]`.
    """
    lengths = [len(tokens_of(family, part)) for part in row]
    ends = [sum(lengths[: number + 1]) for number in range(0, len(row), 2)]
    # The last token of an answer is read with the prompt that follows.
    starts = [0, *[end + ANSWER - 1 for end in ends[:-1]]]
    outcome = read(reference_row(family, model, row), list(zip(starts, ends, strict=True)), method)
    return outcome, [outcome.at(range(end - 1, end - 1 + ANSWER)) for end in ends]
