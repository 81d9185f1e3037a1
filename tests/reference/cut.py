"""Runs a hybrid decoder's own layers, without a cache, on the tokens that were not dropped.

This computes the same numbers as `hybrid` and shares no mathematics with it: each layer module is
called once, on a row of only the tokens that reached it.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .dense import Act, visible_after
from .hybrid import attending_layers


@torch.no_grad()
def cut_logits(model: PreTrainedModel, token_ids: Sequence[int], act: Act) -> Tensor:
    """Runs a whole row layer by layer, where each layer reads only the tokens that reached it."""
    assert act.reached is not None, "what reached which layer"
    untyped = cast(Any, model)
    decoded = list(range(act.end, len(token_ids)))
    there = list(range(len(token_ids)))
    masks = attention_masks(model, act, len(token_ids))
    hidden = untyped.model.embed_tokens(torch.tensor([list(token_ids)]))
    for layer_idx, layer in enumerate(untyped.model.layers):
        entering = [*act.reached[layer_idx], *decoded]
        hidden = hidden[:, [there.index(position) for position in entering]]
        there = entering
        turns = untyped.model.rotary_emb(hidden, torch.tensor([there]))
        mask = masks[layer_idx][:, :, there][..., there] if layer_idx in masks else None
        hidden = layer(hidden, position_embeddings=turns, attention_mask=mask)
    logits: Tensor = untyped.lm_head(untyped.model.norm(hidden))[0]
    return logits[-1 - len(decoded) :]


def attention_masks(model: PreTrainedModel, act: Act, length: int) -> dict[int, Tensor]:
    """Returns a float mask `[1, query_heads, len, len]` for each attending layer."""
    assert act.reached is not None, "what reached which layer"
    attending = attending_layers(model)
    kept = [act.kept[index] for index in attending]
    reached = [act.reached[index] for index in attending]
    visible = visible_after(
        [Act(0, act.end, kept, reached)], cast(Any, model).config.num_attention_heads, length
    )
    lowest = torch.finfo(torch.float32).min
    return {
        index: torch.where(mask, 0.0, lowest)[None]
        for index, mask in zip(attending, visible, strict=True)
    }
