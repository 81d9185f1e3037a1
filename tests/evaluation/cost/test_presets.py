"""Published models by name: what their cards say, from the shapes that they are counted with."""

import pytest

from kvpolicy.evaluation import estimate, load_shape
from kvpolicy.evaluation.cost.model_shape import ModelShape
from kvpolicy.evaluation.cost.presets import _HUB_NAMES, PRESETS
from kvpolicy.policies import FullContext


def multiplied(shape: ModelShape, *, tied: bool = False) -> float:
    """Billions of weights: of all layers, of the output head and, unless tied, the embeddings."""
    vocabulary = shape.vocab_size * shape.hidden_size * (1 if tied else 2)
    layers = sum(shape.attention_weights + mlp for mlp in shape.mlp_weights)
    return (layers + vocabulary) / 1e9


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
    ],
)
def test_dense_models_have_the_parameters_of_their_cards(name: str, billions: float) -> None:
    assert multiplied(PRESETS[name]) == pytest.approx(billions, abs=0.01)


def test_gemma_ties_its_embeddings() -> None:
    assert multiplied(PRESETS["gemma-3-27b"], tied=True) == pytest.approx(27.0, abs=0.02)


@pytest.mark.parametrize(("name", "billions"), [("gpt-oss-20b", 3.61), ("gpt-oss-120b", 5.13)])
def test_gpt_oss_has_as_many_active_parameters(name: str, billions: float) -> None:
    """Its card counts the output head and not the embeddings, as here where they are tied."""
    assert multiplied(PRESETS[name], tied=True) == pytest.approx(billions, abs=0.01)


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
        assert estimate(FullContext(), load_shape(spelling), 64).full_kv_bytes == 64 * token_bytes


def test_beyond_their_windows_layers_keep_those() -> None:
    """Of 32,768 tokens: 10 layers all and 52 the last 1,023; 12 layers all and 12 the last 127."""
    gemma = estimate(FullContext(), PRESETS["gemma-3-27b"], 32768)
    assert gemma.kv_bytes == (10 * 32768 + 52 * 1023) * 2 * 16 * 128 * 2
    gpt_oss = estimate(FullContext(), PRESETS["gpt-oss-20b"], 32768)
    assert gpt_oss.kv_bytes == (12 * 32768 + 12 * 127) * 2 * 8 * 64 * 2
    assert gpt_oss.kept_tokens[:2] == (127, 32768)
    assert [i for i, window in enumerate(PRESETS["gemma-3-27b"].windows) if window is None] == [
        *range(5, 62, 6)
    ]


def test_every_name_is_that_of_a_preset() -> None:
    assert [shape.name for shape in PRESETS.values()] == list(PRESETS)
    assert list(_HUB_NAMES) == list(PRESETS)
