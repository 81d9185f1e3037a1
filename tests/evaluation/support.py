"""What tests of commands share."""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

# A command with its arguments: exit status, standard output, standard error.
Run = Callable[..., tuple[int, str, str]]


def fails(result: tuple[int, str, str], status: int, said: str) -> None:
    """One clear line on stderr, nothing on stdout, no traceback."""
    assert result[:2] == (status, "")
    lines = [line for line in result[2].splitlines() if line.strip()]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert said in lines[0]


def works(result: tuple[int, str, str]) -> str:
    """What a command prints that succeeds and has no messages."""
    status, shown, err = result
    assert (status, err) == (0, "")
    return shown


NEEDLE = Path(__file__).parents[1] / "needle/weights"
"""The folder of a small trained model, whose vocabulary is f1, f2, ... and s1, s2, ..."""


def tiny_llama() -> PreTrainedModel:
    """A random Llama of large weights, for `tiny_tokenizer`."""
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.3,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return LlamaForCausalLM(config).eval()
