"""Computes causal attention of one query head to one KV head, with the softmax written out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Entry:
    """The position, key and value that one KV head of one layer stores for one token.

    Attributes:
        position: the token's position in the row, where every token counts; after a restart the
            rotary position in `key` is a different one.
        key: `[head_dim]`, after rotary embedding.
        value: `[head_dim]`.
    """

    position: int
    key: Tensor
    value: Tensor


def masked_softmax(scores: Tensor, visible: Tensor) -> Tensor:
    """Computes softmax in float32 over the visible keys; the others get 0."""
    scores = scores.to(torch.float32)
    highest = scores.masked_fill(~visible, -math.inf).amax(dim=-1, keepdim=True)
    weights = torch.where(visible, torch.exp(scores - highest), torch.zeros(()))
    return weights / weights.sum(dim=-1, keepdim=True)


def attention_probabilities(
    queries: Tensor, query_positions: Sequence[int], entries: Sequence[Entry], scaling: float
) -> Tensor:
    """Computes causal attention of one query head over the entries of its KV head."""
    keys = torch.stack([entry.key for entry in entries])
    visible = torch.tensor(
        [[entry.position <= position for entry in entries] for position in query_positions],
        dtype=torch.bool,
    ).view(len(query_positions), len(entries))
    return masked_softmax(queries @ keys.T * scaling, visible)
