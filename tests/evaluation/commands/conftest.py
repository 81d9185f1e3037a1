"""Commands in these tests ask a small model where a user's would ask the default one."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.evaluation.support import NEEDLE
from tests.evaluation.tokenizers import CHAT, tiny_tokenizer


@pytest.fixture(autouse=True)
def small_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpolicy.evaluation.models.default_model", lambda progress=None: NEEDLE)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of large weights that reads any text, with a chat template."""
    path = tmp_path_factory.mktemp("tiny") / "model"
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
        LlamaForCausalLM(config).save_pretrained(path)
    tiny_tokenizer(chat=CHAT, special=True).save_pretrained(path)
    return path
