"""Builds tiny decoder models with random weights and peaked attention, one per family.

Freshly initialised models attend almost uniformly: every selection is then a near tie, and evicting
a token hardly changes the output, so that a wrong implementation passes. Here the query and key
projections are scaled up until attention is peaked, while the residual stream and the logits stay
of order one to ten, so that float32 rounding stays near 1e-5 in the logits.
"""

import math
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
FAMILIES: tuple[Family, ...] = get_args(Family)
VOCAB_SIZE = 97
PAD_TOKEN_ID = 0

_CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
# Mistral and Qwen3 take a head_dim that is not hidden_size / query_heads; Qwen2 has no such field.
_HEAD_DIM: dict[str, int | None] = {"llama": None, "mistral": 10, "qwen2": None, "qwen3": 12}


def tiny_model(
    family: Family,
    *,
    seed: int,
    num_layers: int = 4,
    query_heads: int = 6,
    kv_heads: int = 2,
    hidden_size: int = 48,
    intermediate_size: int = 80,
    scale: float = 1.8,
    attn_implementation: str = "sdpa",
) -> PreTrainedModel:
    """Builds a tiny float32 causal language model in evaluation mode.

    The configuration has no end-of-sequence token (`eos_token_id=None`), so `generate` always runs
    to `max_new_tokens`. `PAD_TOKEN_ID` has an ordinary embedding: padding that leaks shows.
    """
    config_class, model_class = _CLASSES[family]
    options: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": query_heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": PAD_TOKEN_ID,
        "sliding_window": None,
        "attn_implementation": attn_implementation,
    }
    if family == "llama":
        del options["sliding_window"]
    if _HEAD_DIM[family] is not None:
        options["head_dim"] = _HEAD_DIM[family]
    with torch.random.fork_rng(devices=[]):  # building a model draws from the global generator
        model = cast(PreTrainedModel, model_class(config_class(**options)))
    _fill(model, torch.Generator().manual_seed(seed), scale)
    return model.eval()


@torch.no_grad()
def _fill(model: PreTrainedModel, generator: torch.Generator, scale: float) -> None:
    """Fills every parameter with random numbers on a scale that suits its role."""
    for name, parameter in model.named_parameters():
        draw = torch.randn(parameter.shape, generator=generator)
        if "q_norm" in name or "k_norm" in name:
            draw = scale * (1 + 0.1 * draw)  # these set the size of queries and keys
        elif "norm" in name:
            draw = 1 + 0.1 * draw
        elif name.endswith("bias"):
            draw = 0.3 * draw
        elif "embed_tokens" not in name:
            gain = 1.0
            if "q_proj" in name or "k_proj" in name:
                gain = scale
            elif "lm_head" in name or "o_proj" in name:
                gain = 1.5  # what attention brings must matter for the next token
            draw = draw * gain / math.sqrt(parameter.shape[1])
        parameter.copy_(draw)


def random_tokens(seed: int, length: int) -> list[int]:
    """Draws `length` random token ids, never `PAD_TOKEN_ID`."""
    generator = torch.Generator().manual_seed(seed)
    drawn: Tensor = torch.randint(1, VOCAB_SIZE, (length,), generator=generator)
    return [int(token) for token in drawn]
