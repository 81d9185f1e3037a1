"""Computes one decoder layer of a Llama-like model from a Transformers model's weights.

Nothing of Transformers' attention, masks, rotary embedding or caches is used: only the weights are
read, and the MLP module is called. It computes one row at a time, without batch axis or padding.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import PreTrainedModel

from .attention import Entry


@dataclass(frozen=True)
class Geometry:
    """The sizes of a model's attention; only sizes that this reference covers are allowed."""

    num_layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float


def geometry(model: PreTrainedModel) -> Geometry:
    """Reads the sizes from the configuration and the weights of `model`."""
    config: Any = model.config
    rope: dict[str, Any] = config.rope_parameters
    assert rope["rope_type"] == "default", "only the default rotary embedding is covered"
    assert rope.get("partial_rotary_factor", 1.0) == 1.0, "rotary embedding must cover the head"
    assert getattr(config, "sliding_window", None) is None, "no sliding window here"
    layers = decoder_layers(model)
    query_heads = int(config.num_attention_heads)
    head_dim = int(layers[0].self_attn.q_proj.weight.shape[0]) // query_heads
    kv_heads = int(config.num_key_value_heads)
    return Geometry(len(layers), query_heads, kv_heads, head_dim, float(rope["rope_theta"]))


def decoder_layers(model: PreTrainedModel) -> list[Any]:
    """Returns the decoder layer modules in order; untyped, since families share no class."""
    return list(cast(Any, model).model.layers)


def embed(model: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    """Returns the embeddings `[len, hidden]` of tokens."""
    weight: Tensor = cast(Any, model).model.embed_tokens.weight
    return torch.stack([weight[token] for token in token_ids])


def rms_norm(hidden: Tensor, norm: Any) -> Tensor:
    """Computes `weight * x / sqrt(mean(x^2) + eps)` over the last axis of `hidden`."""
    mean_square = (hidden * hidden).mean(dim=-1, keepdim=True)
    normed: Tensor = norm.weight * (hidden / torch.sqrt(mean_square + norm.variance_epsilon))
    return normed


@functools.cache
def angles_of(position: int, half: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the cosines and sines, `[half]` each, of a position's rotary angles."""
    # Angles are rounded to float32 as in the models: at position 80 that is 4e-6 of a radian.
    frequencies = torch.tensor([theta ** (-i / half) for i in range(half)], dtype=torch.float32)
    angles = position * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(vector: Tensor, position: int, theta: float) -> Tensor:
    """Rotates the pair `(i, i + half)` of `vector` by the angle `position / theta^(i / half)`."""
    half = vector.shape[0] // 2
    cos, sin = angles_of(position, half, theta, vector.dtype)
    first, second = vector[:half], vector[half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin])


def project(
    model: PreTrainedModel,
    layer_idx: int,
    hidden: Tensor,
    positions: Sequence[int],
    rotary: Sequence[int] | None = None,
) -> tuple[list[Tensor], list[list[Entry]]]:
    """Computes the queries, keys and values of one layer for the given tokens."""
    sizes = geometry(model)
    layer = decoder_layers(model)[layer_idx]
    attention = layer.self_attn
    normed = rms_norm(hidden, layer.input_layernorm)
    turns = positions if rotary is None else rotary

    def heads(projection: Any, norm: Any, *, turned: bool) -> list[list[Tensor]]:
        """Returns, for each head, one vector `[head_dim]` per token."""
        flat = linear(normed, projection.weight, projection.bias)
        split: list[list[Tensor]] = []
        for start in range(0, flat.shape[1], sizes.head_dim):
            rows = flat[:, start : start + sizes.head_dim]
            if norm is not None:
                rows = rms_norm(rows, norm)
            if turned:
                pairs = zip(rows, turns, strict=True)
                split.append([rotate(row, at, sizes.rope_theta) for row, at in pairs])
            else:
                split.append(list(rows))
        return split

    queries = heads(attention.q_proj, getattr(attention, "q_norm", None), turned=True)
    keys = heads(attention.k_proj, getattr(attention, "k_norm", None), turned=True)
    values = heads(attention.v_proj, None, turned=False)
    entries = [
        [Entry(*fields) for fields in zip(positions, keys[head], values[head], strict=True)]
        for head in range(sizes.kv_heads)
    ]
    return [torch.stack(per_token) for per_token in queries], entries


def finish_layer(
    model: PreTrainedModel, layer_idx: int, hidden: Tensor, heads: Sequence[Tensor]
) -> Tensor:
    """Applies the output projection, the MLP and both residual connections."""
    layer = decoder_layers(model)[layer_idx]
    output = layer.self_attn.o_proj
    hidden = hidden + linear(torch.cat(list(heads), dim=-1), output.weight, output.bias)
    mlp: Tensor = layer.mlp(rms_norm(hidden, layer.post_attention_layernorm))
    return hidden + mlp


def logits_of(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Applies final norm and language-model head, from `[..., hidden]` to `[..., vocab]`."""
    untyped = cast(Any, model)
    return linear(rms_norm(hidden, untyped.model.norm), untyped.lm_head.weight)
