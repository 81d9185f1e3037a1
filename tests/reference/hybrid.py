"""Computes Qwen3-Next, a decoder of recurrent and attending layers.

A recurrent layer has nothing to choose. It reads the tokens that reach it, in order, as if there
were no other tokens: the model's own module is run anew on all of them, without a state.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedModel

from .attention import Entry, attention_probabilities
from .decoder import decoder_layers
from .gem_filter import GemFilter
from .generation import Heads, Held, LayerOutput, ReferenceState
from .methods import Choice, FastKV, LayerView, Method


class HybridState(ReferenceState):
    """The context of one row in a model of the Qwen3-Next family.

    Attributes:
        read: per recurrent layer the normed inputs `[len, hidden]` of all tokens that reached it.
    """

    def __init__(self, model: PreTrainedModel, method: Method) -> None:
        layers = decoder_layers(model)
        middle = default_layer(attending_layers(model), len(layers))
        if isinstance(method, FastKV) and method.tsp_layer is None:
            method = replace(method, tsp_layer=middle)
        if isinstance(method, GemFilter) and method.filter_layer is None:
            method = replace(method, filter_layer=middle)
        super().__init__(model, method)
        self.read: dict[int, Tensor] = {}

    def _heads_held(self) -> list[int]:
        kv_heads = int(cast(Any, self.model).config.num_key_value_heads)
        attending = attending_layers(self.model)
        count = len(decoder_layers(self.model))
        return [kv_heads if index in attending else 0 for index in range(count)]

    def _choose(
        self, layer_idx: int, queries: Heads, positions: Sequence[int], entries: Held
    ) -> Choice:
        if layer_idx not in attending_layers(self.model):
            return Choice([])
        return super()._choose(layer_idx, queries, positions, entries)

    def _first_pass(
        self, token_ids: Sequence[int], positions: Sequence[int], last_layer: int
    ) -> LayerView:
        before = dict(self.read)
        view = super()._first_pass(token_ids, positions, last_layer)
        self.read = before
        return view

    def _view(
        self, layer_idx: int, queries: Heads, positions: Sequence[int], entries: Held
    ) -> LayerView:
        """Returns the view of `ReferenceState`, with the rotated channels marked; see `turn_part`.

        The base is computed from whole pairs, since a share of the channels may be an odd number.
        """
        view = super()._view(layer_idx, queries, positions, entries)
        frequencies = cast(Any, self.model).model.rotary_emb.inv_freq
        pairs = len(frequencies)
        theta = float(frequencies[1]) ** -pairs
        return replace(view, rope_theta=theta, rope_channels=slice(2 * pairs))

    def _logits(self, hidden: Tensor) -> Tensor:
        untyped = cast(Any, self.model)
        return linear(centred_norm(hidden, untyped.model.norm), untyped.lm_head.weight)

    def _layer(
        self, layer_idx: int, hidden: Tensor, positions: Sequence[int], rotary: Sequence[int]
    ) -> LayerOutput:
        layer = decoder_layers(self.model)[layer_idx]
        normed = centred_norm(hidden, layer.input_layernorm)
        queries: list[Tensor] = []
        grown: list[list[Entry]] = []
        if layer_idx in attending_layers(self.model):
            turns = rotary_angles(self.model, rotary)
            queries, gates, new = project_gated(layer.self_attn, normed, positions, turns)
            grown = [old + added for old, added in zip(self.cache[layer_idx], new, strict=True)]
            mixed = attend(layer.self_attn, queries, gates, positions, grown)
        else:
            whole = torch.cat([self.read.get(layer_idx, normed[:0]), normed])
            self.read[layer_idx] = whole
            mixed = layer.linear_attn(whole[None])[0, len(whole) - len(normed) :]
        hidden = hidden + mixed
        mlp = layer.mlp(centred_norm(hidden, layer.post_attention_layernorm)[None])[0]
        return hidden + mlp, queries, grown


def attending_layers(model: PreTrainedModel) -> list[int]:
    """Returns the indices of the attending layers."""
    kinds: list[str] = cast(Any, model).config.layer_types
    assert set(kinds) <= {"full_attention", "linear_attention"}, "no other kinds here"
    return [index for index, kind in enumerate(kinds) if kind == "full_attention"]


def default_layer(attending: Sequence[int], num_layers: int) -> int:
    """Returns the attending layer nearest to `num_layers // 2 - 1`; of two, the later."""
    half = num_layers // 2 - 1
    return min(attending, key=lambda index: (abs(index - half), -index))


def centred_norm(hidden: Tensor, norm: Any) -> Tensor:
    """Computes `(1 + weight) * x / sqrt(mean(x^2) + eps)` over the last axis of `hidden`."""
    mean_square = (hidden * hidden).mean(dim=-1, keepdim=True)
    normed: Tensor = (1 + norm.weight) * (hidden / torch.sqrt(mean_square + norm.eps))
    return normed


def rotary_angles(model: PreTrainedModel, rotary: Sequence[int]) -> list[Tensor]:
    """Returns, for each token, the rotary angles `[pairs]` of its queries and keys."""
    frequencies: Tensor = cast(Any, model).model.rotary_emb.inv_freq
    return [position * frequencies for position in rotary]


def turn_part(vector: Tensor, angles: Tensor) -> Tensor:
    """Rotates the pairs `(i, i + pairs)` of `vector` by `angles [pairs]`, and leaves the rest."""
    pairs = len(angles)
    first, second, rest = vector.split([pairs, pairs, len(vector) - 2 * pairs])
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest])


def project_gated(
    attention: Any, normed: Tensor, positions: Sequence[int], turns: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor], list[list[Entry]]]:
    """Returns queries and gates per query head `[len, head_dim]`, and entries per KV head."""
    head_dim = attention.head_dim

    def turned(rows: Tensor, norm: Any) -> list[Tensor]:
        pairs = zip(centred_norm(rows, norm), turns, strict=True)
        return [turn_part(row, angles) for row, angles in pairs]

    queries, gates = [], []
    flat = linear(normed, attention.q_proj.weight, attention.q_proj.bias)
    for both in flat.split(2 * head_dim, dim=1):
        queries.append(torch.stack(turned(both[:, :head_dim], attention.q_norm)))
        gates.append(both[:, head_dim:])
    keys = linear(normed, attention.k_proj.weight, attention.k_proj.bias).split(head_dim, dim=1)
    values = linear(normed, attention.v_proj.weight, attention.v_proj.bias).split(head_dim, dim=1)
    entries = [
        [
            Entry(*fields)
            for fields in zip(positions, turned(key, attention.k_norm), value, strict=True)
        ]
        for key, value in zip(keys, values, strict=True)
    ]
    return queries, gates, entries


def attend(
    attention: Any,
    queries: Sequence[Tensor],
    gates: Sequence[Tensor],
    positions: Sequence[int],
    held: Sequence[Sequence[Entry]],
) -> Tensor:
    """Returns the output of the layer's attention `[len, hidden]`; a gate scales each head."""
    group = len(queries) // len(held)
    outputs = []
    for head, (head_queries, gate) in enumerate(zip(queries, gates, strict=True)):
        entries = held[head // group]
        given = attention_probabilities(head_queries, positions, entries, float(attention.scaling))
        output = given @ torch.stack([entry.value for entry in entries])
        outputs.append(output * torch.sigmoid(gate))
    return linear(torch.cat(outputs, dim=1), attention.o_proj.weight, attention.o_proj.bias)
