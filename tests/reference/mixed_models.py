"""Builds tiny models with latent attention, with an indexer, and with recurrent layers."""

from dataclasses import replace
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from tests.families import FAMILIES as BUILDS
from tests.families import Family

# Whether the installed Transformers has a model whose layers have an indexer.
HAS_INDEXERS = "deepseek_v32" in CONFIG_MAPPING_NAMES

LINEAR, FULL = "linear_attention", "full_attention"


def latent_model(
    seed: int, *, num_layers: int = 4, attn_implementation: str = "sdpa"
) -> PreTrainedModel:
    """Builds a tiny DeepSeek V3; its first layer has an MLP, the other layers have experts."""
    build = BUILDS["deepseek_v3"]
    options = {**build.options, "num_hidden_layers": num_layers}
    build = replace(build, options=options)
    return build.build(seed, attn_implementation=attn_implementation)


def indexed_model(
    seed: int, *, index_topk: int = 8, attn_implementation: str = "sdpa"
) -> PreTrainedModel:
    """Builds a tiny DeepSeek V3.2; its first layer has an MLP, the other layers have experts.

    It has many index heads: with few heads, scores are often 0, so that several are equally good.
    """
    sizes = {"index_topk": index_topk, "index_n_heads": 32, "index_head_dim": 16}
    build = Family("deepseek_v32", {**BUILDS["deepseek_v3"].options, **sizes})
    return build.build(seed, attn_implementation=attn_implementation)


@torch.no_grad()
def hybrid_model(
    seed: int,
    *,
    layer_types: tuple[str, ...] = (LINEAR, FULL, LINEAR, FULL),
    attn_implementation: str = "sdpa",
) -> PreTrainedModel:
    """Builds a tiny Qwen3-Next whose recurrent layers have a long memory.

    As initialised, most heads forget everything in one step, so that what was read before hardly
    matters. Here a head's memory decays to a half in about 2 to 100 tokens.
    """
    build = BUILDS["qwen3_next"]
    options = {
        **build.options,
        "num_hidden_layers": len(layer_types),
        "layer_types": list(layer_types),
    }
    build = replace(build, options=options)
    model = build.build(seed, attn_implementation=attn_implementation)
    for layer, kind in zip(cast(Any, model).model.layers, layer_types, strict=True):
        if kind == LINEAR:
            rates = layer.linear_attn.A_log
            rates.copy_(torch.linspace(0.005, 0.3, len(rates)).log())
    return model
