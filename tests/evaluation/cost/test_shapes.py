"""Shapes: counted weights against those of real modules, and configurations that are refused."""

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.evaluation import estimate, load_shape, shape_of
from kvpolicy.evaluation.cost.presets import PRESETS
from kvpolicy.evaluation.cost.shapes import FAMILIES
from kvpolicy.policies import FullContext

LLAMA = "llama-3.1-8b"


def tiny_config(family: str) -> Any:
    """A configuration of a family in which every width is another number."""
    sizes = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "moe_intermediate_size": 28,
        "shared_expert_intermediate_size": 20,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_local_experts": 5,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "vocab_size": 97,
        "max_position_embeddings": 128,
        "layer_types": ["full_attention"] * 4,
        "mlp_only_layers": [1],
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    known = AutoConfig.for_model(family).to_dict().keys()
    taken = {name: value for name, value in sizes.items() if name in known}
    if family in ("nemotron", "ministral"):  # its own default does not work
        taken["head_dim"] = 8
    return AutoConfig.for_model(family, **taken)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_have_the_weights_they_are_counted_with(family: str) -> None:
    config = tiny_config(family)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_of(config)
    layers = model.get_decoder().layers
    assert len(layers) == shape.num_layers == 4
    for layer, mlp in zip(layers, shape.mlp_weights, strict=True):
        weights = 0.0
        for name, parameter in layer.named_parameters():
            if parameter.ndim > 1 and not name.endswith("_bias"):
                active = 2 / 5 if ".experts." in name else 1
                weights += active * parameter.numel()
        assert shape.attention_weights + mlp == pytest.approx(weights)
    assert shape.vocab_size * shape.hidden_size == model.get_output_embeddings().weight.numel()


def test_a_mixture_has_dense_layers_where_it_says() -> None:
    dense, sparse = 3 * 48 * 80, 3 * 48 * 2 * 28 + 5 * 48
    assert shape_of(tiny_config("qwen3_moe")).mlp_weights == (sparse, dense, sparse, sparse)


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
        assert attrs.evolve(load_shape(str(path)), name=LLAMA) == PRESETS[LLAMA]
    wrapped = {"model_type": "llava", "text_config": LLAMA_CONFIG}
    folder = config_folder(tmp_path / "wrapped", **wrapped)
    assert attrs.evolve(load_shape(str(folder)), name=LLAMA) == PRESETS[LLAMA]


def test_presets_are_found_in_any_case() -> None:
    assert load_shape("LLaMA-3.1-8B") is PRESETS[LLAMA]
    assert [shape.name for shape in PRESETS.values()] == list(PRESETS)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "mamba"}, "model_type of .* must be one whose layers are known, llama,"),
        ({"model_type": "t5"}, "got 't5'"),
        ({"model_type": "never_heard_of"}, "could not be read: .*never_heard_of"),
        ({"model_type": 3}, "must be a JSON object with a model_type"),
        ({"num_hidden_layers": 0}, "^num_hidden_layers of .* must be an int of at least 1, got 0"),
        ({"hidden_size": "wide"}, "could not be read: .*hidden_size"),
        ({"num_key_value_heads": 5}, "query_heads must be a multiple of kv_heads, got 32 and 5"),
        (
            {"model_type": "qwen3", "layer_types": ["linear_attention"] * 32},
            "layer_types of .* must be full_attention or sliding_attention, got linear_attention",
        ),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}, "could not be read"),
    ],
)
def test_configurations_that_are_refused(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    folder = config_folder(tmp_path / "model", **{**LLAMA_CONFIG, **change})
    with pytest.raises(ValueError, match=said):
        load_shape(str(folder))


def test_windows_are_read_layer_by_layer(tmp_path: Path) -> None:
    content = {**LLAMA_CONFIG, "model_type": "mistral", "sliding_window": 4096}
    shape = load_shape(str(config_folder(tmp_path / "model", **content)))
    assert shape.windows == (4096,) * 32
    full = {**content, "model_type": "qwen3", "layer_types": ["full_attention"] * 32}
    assert load_shape(str(config_folder(tmp_path / "full", **full))).windows == ()
    mixed = ["sliding_attention", "full_attention"] * 16
    some = {**content, "model_type": "qwen3", "layer_types": mixed, "use_sliding_window": True}
    shape = load_shape(str(config_folder(tmp_path / "some", **some)))
    assert shape.windows == (4096, None) * 16


def test_unsupported_is_an_error_of_its_own(tmp_path: Path) -> None:
    folder = config_folder(tmp_path / "model", **{**LLAMA_CONFIG, "model_type": "mamba"})
    with pytest.raises(UnsupportedModelError):
        load_shape(str(folder))


def test_what_is_no_name_and_no_configuration() -> None:
    with pytest.raises(TypeError, match="name must be a str, got None"):
        load_shape(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="config must be a configuration of Transformers, got None"):
        shape_of(None)
    with pytest.raises(TypeError, match="shape must be a ModelShape, got None"):
        estimate(FullContext(), None, 100)  # type: ignore[arg-type]
