"""Compute a model's logits by dense attention without a cache, with evicted tokens masked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel

NAME = "dense_under_masks"


def visible_after(
    kept: Sequence[Sequence[Sequence[int]]], first_len: int, length: int
) -> list[Tensor]:
    """Return a mask ``[kv_heads, length, length]`` per layer that hides evicted keys.

    The masks are causal; of the first prompt, later tokens see only the positions kept.

    Args:
        kept: Positions kept, ``[layer][head]``.
        first_len: Tokens of the prompt.
        length: Tokens in all.
    """
    masks = []
    for layer in kept:
        mask = torch.ones(len(layer), length, length, dtype=torch.bool).tril()
        mask[:, first_len:, :first_len] = False
        for head, positions in enumerate(layer):
            mask[head, first_len:, list(positions)] = True
        masks.append(mask)
    return masks


@torch.inference_mode()
def dense_logits(
    model: PreTrainedModel,
    ids: Sequence[int],
    kept: Sequence[Sequence[Sequence[int]]],
    first_len: int,
) -> Tensor:
    """Return the logits of the next token, if later tokens see only the prompt's kept tokens.

    Args:
        model: A model with any attention implementation, which is restored afterwards.
        ids: The prompt and what came after it.
        kept: See `visible_after`.
        first_len: Tokens of the prompt.
    """
    masks = visible_after(kept, first_len, len(ids))

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        group = query.shape[1] // key.shape[1]
        attended = functional.scaled_dot_product_attention(
            query,
            key.repeat_interleave(group, dim=1),
            value.repeat_interleave(group, dim=1),
            attn_mask=masks[module.layer_idx].repeat_interleave(group, dim=0)[None],
            scale=options["scaling"],
        )
        return attended.transpose(1, 2).contiguous(), None

    AttentionInterface.register(NAME, attend)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        logits: Tensor = model(torch.tensor([list(ids)]), use_cache=False).logits
        return logits[0, -1]
    finally:
        model.set_attn_implementation(before)


def difference(logits: Tensor, expected: Tensor) -> float:
    """Return the largest difference between two sets of logits."""
    return float((logits - expected).abs().max())
