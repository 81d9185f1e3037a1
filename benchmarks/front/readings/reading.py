"""Read documents with a Llama model of Transformers and keep what its attention works with.

Plain torch on the model's own modules. Nothing of the library's scorers is used, so the study is an
independent reference for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

# Queries whose attention weights are held at a time.
BLOCK = 256
Seen = Callable[[Tensor, int], Tensor]


@attrs.frozen(eq=False)
class States:
    """Queries, keys and values of one layer, before rotary embedding.

    Args:
        queries: ``[batch, query_heads, tokens, head_dim]``.
        keys: ``[batch, kv_heads, tokens, head_dim]``.
        values: As the keys.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor


@attrs.frozen(eq=False)
class Reading:
    """What one causal reading of documents leaves.

    Args:
        model: The model that read.
        ids: ``[batch, length]``, all rows equally long.
        hidden: What entered each layer, ``[batch, length, hidden_size]``.
        layers: The states of every layer.
        logits: ``[batch, length, vocabulary]``.
    """

    model: LlamaForCausalLM
    ids: Tensor
    hidden: tuple[Tensor, ...]
    layers: tuple[States, ...]
    logits: Tensor

    @property
    def length(self) -> int:
        """The number of tokens of every row."""
        return self.ids.shape[1]

    @property
    def places(self) -> Tensor:
        """The position of every token, ``[length]``."""
        return torch.arange(self.length)

    @property
    def kv_heads(self) -> int:
        """The number of heads of keys and values."""
        return self.layers[0].keys.shape[1]

    def row(self, index: int) -> Reading:
        """Return the reading of one row."""
        one = slice(index, index + 1)
        layers = (States(s.queries[one], s.keys[one], s.values[one]) for s in self.layers)
        hidden = tuple(each[one] for each in self.hidden)
        return Reading(self.model, self.ids[one], hidden, tuple(layers), self.logits[one])


@torch.no_grad()
def read(model: LlamaForCausalLM, ids: Tensor) -> Reading:
    """Read documents once.

    Args:
        model: In evaluation mode.
        ids: ``[batch, length]`` without padding.
    """
    found = model(ids, output_hidden_states=True, use_cache=False)
    hidden = found.hidden_states[:-1]
    layers = tuple(states(model, index, each) for index, each in enumerate(hidden))
    return Reading(model, ids, hidden, layers, found.logits)


def states(model: LlamaForCausalLM, index: int, hidden: Tensor) -> States:
    """Return what a layer makes of the hidden states that enter it."""
    layer: Any = model.model.layers[index]
    normed = layer.input_layernorm(hidden)
    attention, size = layer.self_attn, layer.self_attn.head_dim
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    return States(*(each(normed).unflatten(-1, (-1, size)).transpose(1, 2) for each in projections))


def rotated(model: LlamaForCausalLM, each: Tensor, places: Tensor) -> Tensor:
    """Return queries or keys after rotary embedding at positions ``[tokens]``."""
    cosine, sine = model.model.rotary_emb(each, places[None])
    first, second = each.chunk(2, dim=-1)
    turned: Tensor = each * cosine[:, None] + torch.cat([-second, first], dim=-1) * sine[:, None]
    return turned


def received(
    queries: Tensor, keys: Tensor, seen: Seen | None = None, *, total: bool = False
) -> Tensor:
    """Return the largest (or the whole) attention weight that every key receives.

    ``softmax(q . k / sqrt(head_dim))`` over all keys, block by block of queries.

    Args:
        queries: ``[batch, query_heads, tokens, head_dim]``, rotated.
        keys: ``[batch, kv_heads, length, head_dim]``, rotated.
        seen: Marks what each query sees, bool ``[queries, length]``, for the numbers of a block's
            queries and the number of keys; everything if None.
        total: Whether weights are summed over the queries; otherwise the largest counts.

    Returns:
        ``[batch, query_heads, length]``.
    """
    length, group = keys.shape[2], queries.shape[1] // keys.shape[1]
    found = torch.zeros(*queries.shape[:2], length)
    for row in range(queries.shape[0]):
        for head in range(queries.shape[1]):
            one = keys[row, head // group].T / keys.shape[3] ** 0.5
            for start in range(0, queries.shape[2], BLOCK):
                logits = queries[row, head, start : start + BLOCK] @ one
                if seen is not None:
                    numbers = torch.arange(start, start + len(logits))
                    logits = logits.masked_fill(~seen(numbers, length), -torch.inf)
                weights = logits.softmax(dim=-1)
                if total:
                    found[row, head] += weights.sum(dim=0)
                else:
                    torch.maximum(found[row, head], weights.amax(dim=0), out=found[row, head])
    return found


def grouped(of_heads: Tensor, kv_heads: int, how: str = "max") -> Tensor:
    """Return one value per KV head ``[batch, kv_heads, length]`` of those of its query heads."""
    groups = of_heads.unflatten(1, (kv_heads, -1))
    if how == "mean":
        return groups.mean(dim=2)
    return groups.amax(dim=2) if how == "max" else groups.amin(dim=2)
