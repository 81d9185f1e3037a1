"""Published models by name: what their cards say, from the shapes that they are counted with."""

import pytest
import torch

from kvpolicy.evaluation import estimate_cost, load_shape
from kvpolicy.evaluation.estimate.presets import PRESETS, preset_name
from kvpolicy.policies import FullContext


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-70b", 70.55),
        ("ministral-8b", 8.02),
        ("mistral-nemo-12b", 12.25),
        ("mistral-small-24b", 23.57),
        ("phi-4", 14.66),
        ("qwen3-8b", 8.19),
        ("qwen3-32b", 32.76),
        ("gemma-3-27b", 27.01),
        ("gpt-oss-20b", 20.91),
        ("gpt-oss-120b", 116.83),
        ("gemma-4-26b", 25.23),
        ("qwen3.6-35b-a3b", 34.66),
        ("deepseek-v3", 671.03),
    ],
)
def test_models_have_the_parameters_of_their_cards(name: str, billions: float) -> None:
    """Without vision towers, and without DeepSeek's layer that predicts several tokens."""
    shape = load_shape(name)
    assert shape.weight_bytes / 2e9 == pytest.approx(billions, abs=0.01)
    in_floats = estimate_cost(FullContext(), load_shape(name, torch.float32), 8)
    assert in_floats.weight_bytes == 2 * shape.weight_bytes


@pytest.mark.parametrize(
    ("name", "token_bytes"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 32 * 2 * 8 * 128 * 2),  # 128 KiB
        ("meta-llama/Llama-3.1-70B-Instruct", 80 * 2 * 8 * 128 * 2),
        ("Qwen/Qwen3-8B", 36 * 2 * 8 * 128 * 2),
        ("Qwen/Qwen3-32B", 64 * 2 * 8 * 128 * 2),
        ("mistralai/Mistral-Small-24B-Instruct-2501", 40 * 2 * 8 * 128 * 2),
        ("microsoft/phi-4", 40 * 2 * 10 * 128 * 2),
        ("openai/gpt-oss-20b", 24 * 2 * 8 * 64 * 2),
        ("openai/gpt-oss-120b", 36 * 2 * 8 * 64 * 2),
        ("google/gemma-3-27b-it", 62 * 2 * 16 * 128 * 2),
    ],
)
def test_bytes_of_a_token_in_the_hubs_spelling(name: str, token_bytes: int) -> None:
    for spelling in (name, name.lower(), name.split("/")[1]):
        assert (
            estimate_cost(FullContext(), load_shape(spelling), 64).full_kv_bytes == 64 * token_bytes
        )


def test_beyond_their_windows_layers_keep_those() -> None:
    """Of 32,768 tokens: 10 layers all and 52 the last 1,023; 12 layers all and 12 the last 127."""
    gemma = estimate_cost(FullContext(), load_shape("gemma-3-27b"), 32768)
    assert gemma.kv_bytes == (10 * 32768 + 52 * 1023) * 2 * 16 * 128 * 2
    gpt_oss = estimate_cost(FullContext(), load_shape("gpt-oss-20b"), 32768)
    assert gpt_oss.kv_bytes == (12 * 32768 + 12 * 127) * 2 * 8 * 64 * 2
    assert gpt_oss.kept_tokens[:2] == (127, 32768)
    assert [
        i for i, each in enumerate(load_shape("gemma-3-27b").layers) if each.window is None
    ] == [*range(5, 62, 6)]


def test_latents_states_and_windows_on_paper() -> None:
    deepseek = load_shape("deepseek-v3")
    assert {layer.token_bytes for layer in deepseek.layers} == {2 * (512 + 64)}
    assert estimate_cost(FullContext(), deepseek, 1000).kv_bytes == 61 * 1000 * 576 * 2
    # 30 layers hold a state of 32 heads of 128 x 128 in float32, and 4 steps of a convolution over
    # 2 x 16 x 128 + 32 x 128 channels; 10 have 2 KV heads of 256.
    qwen = estimate_cost(FullContext(), load_shape("qwen3.6-35b-a3b"), 1000)
    assert qwen.state_bytes == 30 * (32 * 128 * 128 * 4 + 8192 * 4 * 2)
    assert qwen.kv_bytes == 10 * 1000 * 2 * 2 * 256 * 2 + qwen.state_bytes
    # 5 layers of 30 see all, with 2 KV heads of 512; the others 1,024 tokens, with 8 of 256.
    gemma = estimate_cost(FullContext(), load_shape("gemma-4-26b"), 32768)
    assert gemma.kv_bytes == (5 * 32768 * 2 * 512 + 25 * 1023 * 8 * 256) * 2 * 2


def test_every_name_is_that_of_a_preset() -> None:
    for name, preset in PRESETS.items():
        assert preset_name(name.upper()) == name
        assert {preset_name(hub_name) for hub_name in preset.hub_names} == {name}
