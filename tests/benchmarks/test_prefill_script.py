"""The prefill benchmark's models: what they are shaped like, and that policies read with them."""

import pytest
import torch

from benchmarks.prefill import MODELS, POLICIES, allowed_speedup, random_model, row_of
from kvpolicy.evaluation import measure_latency, shape_of


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_shaped_like_its_namesake(name: str) -> None:
    shape = shape_of(random_model(name).config)
    held = [layer.token_elements for layer in shape.layers]
    states = [bool(layer.state_elements) for layer in shape.layers]
    assert (
        held
        == {
            "llama": [2 * 2 * 64] * 16,
            "qwen3_next": [0, 0, 0, 2 * 2 * 64] * 4,
            "deepseek_v3": [128 + 32] * 16,
        }[name]
    )
    assert states == ([True, True, True, False] * 4 if name == "qwen3_next" else [False] * 16)


@pytest.mark.parametrize("name", MODELS)
def test_rows_at_a_tiny_size(name: str) -> None:
    model = random_model(name, vocab_size=97, hidden_size=64)
    prompt = torch.randint(97, (80,)).tolist()
    measured = measure_latency(model, prompt, POLICIES, rounds=1, new_tokens=2)
    for policy in POLICIES:
        row = row_of(policy, 80, measured, model)
        assert row["speedup"] > 0
        assert row["allowed"] == allowed_speedup(model, POLICIES[policy], 80)
    assert row["policy"] == "fastkv"
    assert 1.2 < row["allowed"] < 1.8
