"""Runs one row through a model's own dense attention, with evicted tokens masked."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.reference.dense import Act, visible_after
from tests.reference.family_dense import layer_modules
from tests.reference.selection import head_mean, max_pool, window_and_highest


@torch.no_grad()
def dense(
    model: PreTrainedModel, token_ids: Sequence[int], acts: Sequence[Act]
) -> tuple[Tensor, list[Tensor]]:
    """Runs a whole row without a cache, with each layer's mask hiding evicted tokens.

    Args:
        model: with eager attention, whose layers take a float mask `[batch, 1, len, len]` by name.
        token_ids: the row, prompts and decoded tokens.
        acts: what was kept of it and when.

    Returns:
        Logits `[len, vocab]`; by layer the attention weights `[query_heads, len, len]`.
    """
    lowest = torch.finfo(torch.float32).min
    visible = visible_after(acts, model.config.num_attention_heads, len(token_ids))

    def narrowed(index: int) -> Any:
        def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            own = kwargs["attention_mask"]
            heads = own.new_zeros(visible[index].shape).masked_fill(~visible[index], lowest)
            return args, {**kwargs, "attention_mask": torch.clamp(own + heads, min=lowest)}

        return hook

    handles = [
        layer.register_forward_pre_hook(narrowed(index), with_kwargs=True)
        for index, layer in enumerate(layer_modules(model))
    ]
    try:
        ids = torch.tensor([list(token_ids)])
        output = model(ids, use_cache=False, output_attentions=True)
    finally:
        for handle in handles:
            handle.remove()
    return output.logits[0], [each[0] for each in output.attentions]


def window_choice(
    weights: Tensor,
    held: Sequence[int],
    prompt: Sequence[int],
    count: int,
    *,
    window: int,
    kernel: int,
) -> list[int]:
    """Returns the positions kept if heads share a choice: the window, and those most attended to.

    Args:
        weights: `[query_heads, len, len]`, a layer's attention, by position.
        held: positions that the layer holds from before, ascending.
        prompt: positions of the new tokens.
        count: tokens to keep.
        window: last tokens, which observe and are kept.
        kernel: odd width of the maximum over neighbours.
    """
    entries = [*held, *prompt]
    observing, before = list(prompt)[-window:], entries[: len(entries) - window]
    by_head = [
        max_pool([sum(float(head[query, key]) for query in observing) for key in before], kernel)
        for head in weights
    ]
    chosen = window_and_highest(head_mean(by_head), len(entries), count)
    return [entries[index] for index in chosen]
