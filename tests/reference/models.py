"""Builds tiny decoder models with random weights and peaked attention, one per family."""

from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.families import FAMILIES as BUILDS
from tests.families import PAD_TOKEN_ID as PAD_TOKEN_ID
from tests.families import VOCAB_SIZE as VOCAB_SIZE

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
FAMILIES: tuple[Family, ...] = get_args(Family)


def tiny_model(
    family: Family,
    *,
    seed: int,
    num_layers: int = 4,
    query_heads: int = 6,
    kv_heads: int = 2,
    hidden_size: int = 48,
    intermediate_size: int = 80,
    attn_implementation: str = "sdpa",
) -> PreTrainedModel:
    """Builds a model of `tests.families`, of other sizes where they are given.

    It has no end-of-sequence token, so `generate` always runs to `max_new_tokens`. `PAD_TOKEN_ID`
    has an ordinary embedding: padding that leaks shows.
    """
    sizes = {
        "num_hidden_layers": num_layers,
        "num_attention_heads": query_heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
    }
    build = BUILDS[family]
    build = replace(build, options={**build.options, **sizes})
    return build.build(seed, attn_implementation=attn_implementation)


def random_tokens(seed: int, length: int) -> list[int]:
    """Draws `length` random token ids, never `PAD_TOKEN_ID`."""
    generator = torch.Generator().manual_seed(seed)
    drawn: Tensor = torch.randint(1, VOCAB_SIZE, (length,), generator=generator)
    return [int(token) for token in drawn]
