"""Shapes: what layers hold against what caches hold, and configurations that are refused."""

import json
from pathlib import Path

import attrs
import pytest
import torch

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.evaluation import ModelShape, estimate_cost, load_shape, shape_of
from kvpolicy.evaluation.estimate.presets import PRESETS
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import FullContext, SnapKV
from tests.integrations.model.builds.catalogue import builds
from tests.integrations.model.builds.dense import decoder_layers

LLAMA = "llama-3.1-8b"


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "phi", "gemma3_text", "gemma4_text", "gpt_oss", "qwen3_moe", "mixtral"),
        "bert",
        *("deepseek_v2", "deepseek_v3", "qwen3_next", "qwen3_5_moe_text", "nemotron_h", "lfm2"),
        *("minimax", "qwen4_exp_text", "glm5_next", "deepseek_ocr2"),
    ],
)
def test_a_shape_has_the_weights_of_the_model(name: str) -> None:
    model = builds()[name].model()
    shape = shape_of(model.config)
    assert len(decoder_layers(model)) == shape.num_layers
    assert shape.weight_bytes == 2 * sum(each.numel() for each in model.parameters())


RIGHT = [
    row["name"]
    for row in json.loads(Path("benchmarks/results/families.json").read_text())
    if row["outcome"] == "right"
]
# They look at numbers, which there are none of, or do not run without images.
UNTRACED = {*("dbrx", "jetmoe", "gpt2", "gpt-sw3"), *("whisper", "step3p7")}


@pytest.mark.parametrize("name", [name for name in RIGHT if name not in UNTRACED])
def test_caches_hold_what_was_counted(name: str) -> None:
    """Keys and values, latents and states, of every kind of layer."""
    model = builds()[name].model()
    shape = shape_of(builds()[name].config(), name, torch.float32)
    for policy in (FullContext(), SnapKV(0.25, window_size=4)):
        cache = PolicyCache(policy)
        with torch.no_grad(), cache.attached(model):
            model(input_ids=torch.arange(5, 45)[None], cache=cache)
        found, held = estimate_cost(policy, shape, 40), cache.report().total
        assert (found.kv_bytes, found.full_kv_bytes) == (held.held_bytes, held.full_bytes)


@pytest.mark.parametrize("name", ["dbrx", "jetmoe", "gpt2"])
def test_models_that_cannot_be_run_without_numbers(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{name} must be a decoder that runs without"):
        shape_of(builds()[name].config(), name)


def config_folder(folder: Path, **content: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    return folder


LLAMA_CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}


def test_a_configuration_is_read_from_its_folder_or_file(tmp_path: Path) -> None:
    folder = config_folder(tmp_path / "model", **LLAMA_CONFIG)
    for path in (folder, folder / "config.json"):
        assert attrs.evolve(load_shape(str(path)), name=LLAMA) == load_shape(LLAMA)
    wrapped = {"model_type": "llava", "text_config": LLAMA_CONFIG}
    folder = config_folder(tmp_path / "wrapped", **wrapped)
    assert attrs.evolve(load_shape(str(folder)), name=LLAMA) == load_shape(LLAMA)


def test_presets_are_found_in_any_case() -> None:
    assert load_shape("LLaMA-3.1-8B") is load_shape(LLAMA)
    assert [load_shape(name).name for name in PRESETS] == list(PRESETS)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "mamba"}, "some layer must hold keys and values, but all of them hold a"),
        ({"model_type": "bloom"}, "must not depend on the columns of keys, but BloomBlock"),
        ({"model_type": "falcon"}, "must attend by Transformers' AttentionInterface"),
        ({"model_type": "never_heard_of"}, "could not be read: .*never_heard_of"),
        ({"model_type": 3}, "must be a JSON object with a model_type"),
        ({"num_hidden_layers": 0}, "^num_hidden_layers of .* must be an int of at least 1, got 0"),
        ({"hidden_size": "wide"}, "could not be read: .*hidden_size"),
        ({"num_key_value_heads": 5}, "must be a decoder that runs without weights, but its run"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}, "could not be read"),
    ],
)
def test_configurations_that_are_refused(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    folder = config_folder(tmp_path / "model", **{**LLAMA_CONFIG, **change})
    with pytest.raises(ValueError, match=said):
        load_shape(str(folder))


def windows(shape: ModelShape) -> tuple[int | None, ...]:
    return tuple(layer.window for layer in shape.layers)


def test_windows_are_read_layer_by_layer(tmp_path: Path) -> None:
    content = {**LLAMA_CONFIG, "model_type": "mistral", "sliding_window": 4096}
    shape = load_shape(str(config_folder(tmp_path / "model", **content)))
    assert windows(shape) == (4096,) * 32
    full = {**content, "model_type": "qwen3", "layer_types": ["full_attention"] * 32}
    assert windows(load_shape(str(config_folder(tmp_path / "full", **full)))) == (None,) * 32
    mixed = ["sliding_attention", "full_attention"] * 16
    some = {**content, "model_type": "qwen3", "layer_types": mixed, "use_sliding_window": True}
    shape = load_shape(str(config_folder(tmp_path / "some", **some)))
    assert windows(shape) == (4096, None) * 16


def test_unsupported_is_an_error_of_its_own(tmp_path: Path) -> None:
    folder = config_folder(tmp_path / "model", **{**LLAMA_CONFIG, "model_type": "mamba"})
    with pytest.raises(UnsupportedModelError):
        load_shape(str(folder))


def test_what_is_no_name_and_no_configuration() -> None:
    with pytest.raises(TypeError, match="name must be a str, got None"):
        load_shape(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="config must be a configuration of Transformers, got None"):
        shape_of(None)
    with pytest.raises(TypeError, match="dtype must be a torch.dtype such as .* got 'float32'"):
        load_shape(LLAMA, "float32")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="shape must be a ModelShape, got None"):
        estimate_cost(FullContext(), None, 100)  # type: ignore[arg-type]
