"""Layers for tests, and changes of one field in a group of a `LayerContext`."""

from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy import LayerContext
from kvpolicy.layer_inputs import AttentionSettings


def layer_context(keys: Tensor, **changes: Any) -> LayerContext:
    """A layer at its first prompt, without queries or padding; values are the keys."""
    batch, kv_heads, key_len, _ = keys.shape
    given = {
        "layer_idx": 0,
        "num_layers": 2,
        "queries": keys[:, :, :0],
        "keys": keys,
        "values": keys,
        "positions": torch.arange(key_len).expand(batch, kv_heads, -1),
        "new_valid": torch.ones(batch, key_len, dtype=torch.bool),
        "seen_len": (key_len,) * batch,
        "attention": AttentionSettings(1.0),
    }
    return LayerContext(**{**given, **changes})


def of_new(count: int) -> Tensor:
    """Validity of one row's `count` new tokens."""
    return torch.ones(1, count, dtype=torch.bool)


def with_layer(context: LayerContext, **changes: Any) -> LayerContext:
    """Return a copy with other heads, history, rotary embedding or output weight."""
    return attrs.evolve(context, layer=attrs.evolve(context.layer, **changes))


def with_attention(context: LayerContext, **changes: Any) -> LayerContext:
    """Return a copy with another scaling, softcap or sinks."""
    return attrs.evolve(context, attention=attrs.evolve(context.attention, **changes))


def with_decoding(context: LayerContext, **changes: Any) -> LayerContext:
    """Return a copy with another state of the scorer, or other positions of the queries."""
    return attrs.evolve(context, decoding=attrs.evolve(context.decoding, **changes))
