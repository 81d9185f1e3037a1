"""Build the model and the prompt that a comparison times."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import attrs
import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_VOCABULARY = 1024
# Before the first counted round, every policy reads the start of the prompt once.
WARM_UP_TOKENS = 512


@attrs.frozen(eq=False)
class Timed:
    """A model and a prompt that policies are timed on, in place of the prompts with answers.

    Args:
        model: A decoder-only model of Transformers, in evaluation mode.
        input_ids: The prompt's tokens.
        words: What the model is, for the table's legend.
    """

    model: PreTrainedModel
    input_ids: tuple[int, ...]
    words: str

    @property
    def processor_time(self) -> bool:
        """True if its times are measured as processor time, which other programs change less."""
        return bool(self.model.device.type == "cpu")


def random_llama(num_layers: int, tokens: int) -> Timed:
    """Return a small Llama of random weights, and a random prompt.

    The bundled model reads short prompts, on which no policy is faster. A random model of as many
    layers reads a long one, with the policies acting at the same layers. Its weights do not change
    what an operation costs.

    Args:
        num_layers: Decoder layers: those of the model that answers.
        tokens: Length of the prompt.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=_VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max(tokens + 1024, 131072),
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    draws = random.Random(0)
    prompt = tuple(draws.randrange(_VOCABULARY) for _ in range(tokens))
    return Timed(model, prompt, f"a random Llama of {num_layers} layers")
