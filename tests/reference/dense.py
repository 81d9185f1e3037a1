"""Computes dense attention under an explicit mask: every layer computes all tokens.

This computes the same numbers in a second way. A policy that evicts tokens must give the same
result as dense attention in which those tokens are masked. The same holds for a policy that drops
tokens in prefill: a token that did not reach a layer is masked for all queries of that layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .attention import masked_softmax
from .decoder import decoder_layers, embed, finish_layer, geometry, logits_of, project


@dataclass(frozen=True)
class Act:
    """One prefill, with the tokens that a policy kept and passed on after it.

    Attributes:
        start: tokens seen before it.
        end: tokens seen after it; the rows from `start` to `end` are its prompt.
        kept: per layer and KV head the positions kept, each of them below `end`.
        reached: per layer the positions of the prompt that reached it; None when all reached all.
    """

    start: int
    end: int
    kept: Sequence[Sequence[Sequence[int]]]
    reached: Sequence[Sequence[int]] | None = None


def causal_visible(num_layers: int, query_heads: int, length: int) -> list[Tensor]:
    """Returns causal masks for all layers: each token sees itself and all earlier ones."""
    mask = torch.tensor([[key <= query for key in range(length)] for query in range(length)])
    return [torch.stack([mask] * query_heads) for _ in range(num_layers)]


def visible_after(acts: Sequence[Act], query_heads: int, length: int) -> list[Tensor]:
    """Returns the masks of a row with eviction after each of its prompts.

    A prompt's rows see, causally, what was held before it and those of the prompt that reached the
    layer; later rows see what the prompt's act kept and all newer tokens. Every token sees itself.
    """
    assert acts[0].start == 0, "the first act starts at 0"
    masks = []
    for layer in range(len(acts[0].kept)):
        group = query_heads // len(acts[0].kept[layer])
        mask = torch.zeros(query_heads, length, length, dtype=torch.bool)
        for head in range(query_heads):
            held: set[int] = set()
            never_reached: set[int] = set()
            for row in range(length):
                for act in acts:
                    if row == act.end:
                        held = set(act.kept[layer][head // group])
                    if row == act.start and act.reached is not None:
                        never_reached |= set(range(act.start, act.end)) - set(act.reached[layer])
                if row not in never_reached:
                    held.add(row)
                mask[head, row, sorted(held | {row})] = True
        masks.append(mask)
    return masks


@torch.no_grad()
def dense_masked_logits(
    model: PreTrainedModel, token_ids: Sequence[int], visible: Sequence[Tensor]
) -> Tensor:
    """Runs a whole row with dense attention, with a separate mask for each head."""
    positions = list(range(len(token_ids)))
    sizes = geometry(model)
    hidden = embed(model, token_ids)
    for layer_idx, mask in enumerate(visible):
        scaling = float(decoder_layers(model)[layer_idx].self_attn.scaling)
        queries, entries = project(model, layer_idx, hidden, positions)
        outputs = []
        for head, head_queries in enumerate(queries):
            held = entries[head // sizes.group]
            keys = torch.stack([entry.key for entry in held])
            values = torch.stack([entry.value for entry in held])
            outputs.append(masked_softmax(head_queries @ keys.T * scaling, mask[head]) @ values)
        hidden = finish_layer(model, layer_idx, hidden, outputs)
    return logits_of(model, hidden)
