"""Kinds of layers that a bound on answers is refused for, by name, before anything is read."""

import pytest
import torch

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import KeyNorm
from tests.integrations.model.builds.catalogue import builds


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("falcon_h1", r"\[0, 1, 2, 3\]"),
        ("gemma3n_text", r"\[2, 3\]"),
        ("deepseek_v32", r"\[0, 1, 2, 3\]"),
        ("gptj", r"\[0, 1, 2, 3\]"),
        ("mllama", r"\[1\]"),
    ],
)
def test_layers_that_cannot_be_bounded(name: str, layers: str) -> None:
    model = builds()[name].model()
    cache = PolicyCache(KeyNorm(retention_tokens=12, decoding=12))
    with (
        pytest.raises(UnsupportedModelError, match=f"must be None with .* as layers {layers}"),
        cache.attached(model),
    ):
        pass
    assert cache.get_seq_length() == 0
    free = PolicyCache(KeyNorm(retention_tokens=12))
    with torch.no_grad(), free.attached(model):
        model(input_ids=torch.arange(5, 45)[None], past_key_values=free)
    assert free.get_seq_length() == 40
