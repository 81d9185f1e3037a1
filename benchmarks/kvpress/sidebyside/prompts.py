"""Make the model and the prompts that both workers load."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 1024


def save_random_llama(folder: Path, max_length: int) -> None:
    """Save a small Llama with random weights, scaled up so that its attention is peaked.

    With Transformers' initialisation, attention is almost uniform, and rounding decides what a
    method keeps. Here products of queries and keys have a standard deviation of about three.

    Args:
        folder: Folder for the safetensors; made if needed.
        max_length: Longest sequence.
    """
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=max_length,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                gain = 1.8 if "q_proj" in name or "k_proj" in name else 1.0
                width = 1 if "embed_tokens" in name else parameter.shape[1]
                draw = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(draw * gain / width**0.5)
    model.save_pretrained(folder)


def random_prompt(seed: int, length: int, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """Return random tokens, none of them 0, the padding token."""
    draw = random.Random(seed)
    return [draw.randrange(1, vocab_size) for _ in range(length)]
