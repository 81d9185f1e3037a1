"""Run a library on a left-padded batch and on a second conversation turn.

Nothing here judges the results; `second_turn` compares them with dense attention under a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .dense import dense_logits, difference
from .noting import noting_positions, noting_visible
from .reading import CACHE, Kept, Library, Reading, Settings, left_padded
from .timing import decode

DECODED = 4
"""Tokens generated in a turn."""


def generate(reading: Reading, ids: Tensor, mask: Tensor, new_tokens: int = DECODED) -> Any:
    """Run greedy ``generate`` with the reading's cache; return sequences and all steps' logits."""
    with reading.generating():
        return reading.model.generate(
            ids,
            attention_mask=mask,
            **{CACHE: reading.cache},
            max_new_tokens=new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )


def answers(
    library: Library,
    model: PreTrainedModel,
    method: str,
    settings: Settings,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
) -> list[list[int]]:
    """Return the tokens that a method generates after each prompt."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        reading = library.begin(model, method, settings)
        output = generate(reading, ids, torch.ones_like(ids), new_tokens)
        found.append(output.sequences[0, ids.shape[1] :].tolist())
    return found


def kept_of(
    library: Library, model: PreTrainedModel, method: str, settings: Settings, prompt: Sequence[int]
) -> list[list[list[int]]]:
    """Return the positions kept of one prompt, ``[layer][head]``."""
    reading = library.begin(model, method, settings, watched=True)
    with torch.inference_mode(), reading.prefilling():
        model(torch.tensor([list(prompt)]), **{CACHE: reading.cache}, logits_to_keep=1)
    return [rows[0] for rows in reading.kept([len(prompt)])]


def padded_batch(
    library: Library,
    model: PreTrainedModel,
    method: str,
    settings: Settings,
    rows: Sequence[Sequence[int]],
) -> list[dict[str, Any]]:
    """Compare the rows of a left-padded batch with each row generated alone.

    Returns:
        For each row: its padding; tokens kept over all layers and heads, alone and in the batch;
        how many of those in the batch are padding; how many are kept both times; slots that
        the row's token sees in the second step, in the first layer (None: all); the largest
        difference of a logit from the row alone in the first step, which depends on no choice, and
        in the second; in the second step also from dense attention to the row's own
        tokens that were kept in the batch; whether the same tokens are generated.
    """

    def run(batch: Sequence[Sequence[int]]) -> tuple[Any, Kept]:
        reading = library.begin(model, method, settings, watched=True)
        output = generate(reading, *left_padded(batch))
        return output, reading.kept([len(row) for row in batch])

    with noting_visible(model) as visible:
        together, kept = run(rows)
    facts = []
    for index, row in enumerate(rows):
        alone, kept_alone = run([row])
        kept_row = [layer[index] for layer in kept]
        real = [[[place for place in head if place >= 0] for head in layer] for layer in kept_row]
        generated = together.sequences[index, -DECODED:]
        expected = dense_logits(model, [*row, int(generated[0])], real, len(row))
        first, second = (logits[index] for logits in together.logits[:2])
        facts.append(
            {
                "padding": max(map(len, rows)) - len(row),
                **_choices(kept_row, [layer[0] for layer in kept_alone]),
                "visible": visible[1] and visible[1][index],
                "first_step_difference": difference(first, alone.logits[0][0]),
                "second_step_difference": difference(second, alone.logits[1][0]),
                "difference_from_kept": difference(second, expected),
                "same_tokens": torch.equal(generated, alone.sequences[0, -DECODED:]),
            }
        )
    return facts


def _choices(kept: list[list[list[int]]], alone: list[list[list[int]]]) -> dict[str, int]:
    """Return the kept positions of all layers and heads with their counts."""
    pairs = [
        (set(head), set(other))
        for layer, others in zip(kept, alone, strict=True)
        for head, other in zip(layer, others, strict=True)
    ]
    return {
        "kept_alone": sum(len(other) for _, other in pairs),
        "kept": sum(len(head) for head, _ in pairs),
        "kept_padding": sum(sum(place < 0 for place in head) for head, _ in pairs),
        "kept_in_both": sum(len(head & other) for head, other in pairs),
    }


def second_turn(
    library: Library,
    model: PreTrainedModel,
    method: str,
    settings: Settings,
    first: Sequence[int],
    added: Sequence[int],
    *,
    way: str,
) -> dict[str, Any]:
    """Run a prompt and a second turn, and compare the second turn with dense attention.

    Args:
        library: The library that reads.
        model: The model.
        method: The method.
        settings: The method's parameters.
        first: The first prompt.
        added: What the user adds to what was generated.
        way: "generate": the whole conversation goes to ``generate`` with the same cache. "loop":
            the model is called with the new tokens and their positions in the conversation.

    Returns:
        Tokens the second turn's first forward computed, their first rotary position, slots held per
        layer after it, and the largest difference of the next token's logits from dense
        attention under the mask of what the first turn kept; or the error that was raised.
    """
    reading = library.begin(model, method, settings, watched=True)
    ids = torch.tensor([list(first)])
    turn = _generate_twice if way == "generate" else _loop_twice
    try:
        with torch.inference_mode():
            conversation, kept, facts = turn(reading, ids, list(added))
            expected = dense_logits(
                model, conversation[0].tolist(), [rows[0] for rows in kept], len(first)
            )
    except (RuntimeError, ValueError, IndexError) as error:
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    return {
        "new_tokens": conversation.shape[1] - len(first),
        "difference_from_kept": difference(facts.pop("logits"), expected),
        **facts,
    }


Turns = tuple[Tensor, Kept, dict[str, Any]]


def _generate_twice(reading: Reading, ids: Tensor, added: list[int]) -> Turns:
    output = generate(reading, ids, torch.ones_like(ids))
    kept = reading.kept([ids.shape[1]])
    conversation = torch.cat([output.sequences, torch.tensor([added])], dim=1)
    with noting_positions(reading.model) as positions:
        output = generate(reading, conversation, torch.ones_like(conversation), new_tokens=1)
    return conversation, kept, _facts(reading, positions[0], output.logits[0][0])


def _loop_twice(reading: Reading, ids: Tensor, added: list[int]) -> Turns:
    with reading.prefilling():
        output = reading.model(ids, **{CACHE: reading.cache})
    kept = reading.kept([ids.shape[1]])
    token = output.logits[:, -1:].argmax(dim=-1)
    seen = ids.shape[1]
    decoded = [int(token), *decode(reading, token, seen, DECODED - 1)]
    seen += DECODED - 1  # the last token decoded is the first of the next forward
    new = torch.tensor([[decoded[-1], *added]])
    reading.start_turn()
    with noting_positions(reading.model) as positions, reading.prefilling():
        output = reading.model(
            new,
            **{CACHE: reading.cache},
            position_ids=torch.arange(seen, seen + new.shape[1])[None],
        )
    conversation = torch.cat([ids, torch.tensor([decoded + added])], dim=1)
    return conversation, kept, _facts(reading, positions[0], output.logits[0, -1])


def _facts(reading: Reading, positions: list[int], logits: Tensor) -> dict[str, Any]:
    return {
        "computed": len(positions),
        "first_position": positions[0],
        "held": reading.held(),
        "logits": logits,
    }
