"""Bytes of released weights: against published checkpoints, quantised modules and paper."""

import json
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoConfig, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
from transformers.integrations.mxfp4 import Mxfp4GptOssExperts

from kvpolicy.evaluation import load_shape
from kvpolicy.evaluation.cost.activations import ModelMemory
from kvpolicy.evaluation.cost.released import method_of
from kvpolicy.evaluation.cost.shapes import load_config
from tests.evaluation.support import Run

SIZES = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "vocab_size": 50,
    "tie_word_embeddings": False,
}
# Rows and columns of a layer's matrices, and numbers of the model that are in none of these.
MATRICES = {
    "q_proj": (96, 96),
    "k_proj": (48, 96),
    "v_proj": (48, 96),
    "o_proj": (96, 96),
    "gate_proj": (160, 96),
    "up_proj": (160, 96),
    "down_proj": (96, 160),
}
OTHERS = 2 * 50 * 96 + (2 * 2 + 1) * 96


@pytest.fixture
def run(run: Run) -> Run:
    return partial(run, "estimate")


def memory(family: str, quantization: object, **sizes: Any) -> ModelMemory:
    config = AutoConfig.for_model(family, **{**SIZES, **sizes}, quantization_config=quantization)
    return ModelMemory(config, "tiny")


def buffers(model: ModelMemory) -> int:
    """Rotary frequencies, which no checkpoint has."""
    return sum(each.nbytes for each in model._model.buffers())


@pytest.mark.parametrize(
    ("name", "parameters", "gib"),
    # Parameters and size of the checkpoint: table 1 of gpt-oss's model card, arXiv 2508.10925.
    [("openai/gpt-oss-20b", 20.91e9, 12.8), ("openai/gpt-oss-120b", 116.83e9, 60.8)],
)
def test_gpt_oss_takes_what_its_card_says(name: str, parameters: float, gib: float) -> None:
    weights = ModelMemory(load_config(name), name).weights
    assert weights.parameters == pytest.approx(parameters, rel=5e-4)
    assert weights.bytes / 2**30 == pytest.approx(gib, abs=0.05)
    assert weights.method == "MXFP4"
    assert 8 * weights.quantised_bytes / weights.quantised == 4.25  # as the card says


def test_gpt_oss_takes_what_its_files_hold() -> None:
    """``total_size`` of model.safetensors.index.json in openai/gpt-oss-20b."""
    model = ModelMemory(load_config("gpt-oss-20b"), "gpt-oss-20b")
    assert model.weights.bytes - buffers(model) == 13_761_264_768


def test_experts_are_as_long_as_transformers_own_in_mxfp4() -> None:
    mxfp4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    model = memory("gpt_oss", mxfp4, num_local_experts=4)
    with torch.device("meta"):
        experts = Mxfp4GptOssExperts(model._text)
    blocks = sum(each.numel() for each in (experts.gate_up_proj, experts.down_proj))
    assert blocks == 2 * 4 * (2 * 160 * 96 + 96 * 160) // 4
    # Two numbers a byte of a block, and a byte of scale for 32 of them.
    assert model.weights.quantised_bytes == 2 * (blocks + blocks * 2 // 32)
    assert model.weights.quantised == 2 * 2 * blocks


@pytest.mark.parametrize("block", [[128, 128], [32, 64], None])
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("llama", {}),
        ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 64}),
        ("deepseek_v3", {"n_routed_experts": 4, "moe_intermediate_size": 64, "n_group": 1}),
    ],
)
def test_fp8_takes_what_transformers_own_modules_take(
    family: str, sizes: dict[str, int], block: list[int] | None
) -> None:
    if family == "deepseek_v3":
        sizes = {**sizes, "topk_group": 1, "first_k_dense_replace": 1, "num_experts_per_tok": 2}
    skipped = ["lm_head", "model.layers.1.self_attn.o_proj"]
    said = {
        "quant_method": "fp8",
        "weight_block_size": block,
        "modules_to_not_convert": skipped,
        "activation_scheme": "dynamic",
    }
    model = memory(family, said, **sizes)
    settings = FineGrainedFP8Config(
        activation_scheme="dynamic", weight_block_size=block, modules_to_not_convert=skipped
    )
    reference = ModelMemory(AutoConfig.for_model(family, **{**SIZES, **sizes}), "plain")._model
    replace_with_fp8_linear(reference, skipped, settings, pre_quantized=True)
    tensors = [*reference.parameters(), *reference.buffers()]
    wanted = sum(each.nbytes for each in {id(it): it for it in tensors}.values())
    assert model.weights.bytes == pytest.approx(wanted, rel=1e-3 if block is None else 0)
    plain = sum(each.numel() * 2 for each in reference.parameters())
    assert model.weights.bytes < 0.9 * plain


GROUP = {"bits": 4, "group_size": 32}
CT: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {**CT, "group_size": 32, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


@pytest.mark.parametrize(
    ("said", "of_a_matrix"),
    [
        # qweight and qzeros in int32, scales in float16, the group of each column in int32.
        (
            {"quant_method": "gptq", **GROUP},
            lambda n, m: n * m // 2 + m // 32 * (n // 2 + 2 * n) + 4 * m,
        ),
        (
            {"quant_method": "gptq", "bits": 8, "group_size": -1},
            lambda n, m: n * m + (n + 2 * n) + 4 * m,
        ),
        ({"quant_method": "awq", **GROUP}, lambda n, m: n * m // 2 + m // 32 * (n // 2 + 2 * n)),
        (
            {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "zero_point": False},
            lambda n, m: n * m // 2 + m // 32 * 2 * n,
        ),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            lambda n, m: n * m // 2 + 4 * (n * m // 64),
        ),
        (
            {"load_in_4bit": True, "bnb_4bit_use_double_quant": True},
            lambda n, m: n * m // 2 + n * m // 64 + 4 * ceil(n * m // 64 / 256),
        ),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, lambda n, m: n * m + 4 * n),
        ({"quant_method": "fbgemm_fp8"}, lambda n, m: n * m + 4 * n),
        (compressed("pack-quantized"), lambda n, m: n * m // 2 + 2 * n * (m // 32) + 16),
        (
            compressed("pack-quantized", symmetric=False),
            lambda n, m: n * m // 2 + 2 * n * (m // 32) + n // 2 * (m // 32) + 16,
        ),
        (compressed("int-quantized", num_bits=8, strategy="channel"), lambda n, m: n * m + 2 * n),
        (compressed("float-quantized", num_bits=8, strategy="tensor"), lambda n, m: n * m + 2),
        (
            compressed("float-quantized", num_bits=8, strategy="block", block_structure=[32, 32]),
            lambda n, m: n * m + 2 * ceil(n / 32) * (m // 32),
        ),
        (
            compressed("nvfp4-pack-quantized", type="float", strategy="tensor_group"),
            lambda n, m: n * m // 2 + n * m // 16 + 4,
        ),
    ],
)
def test_every_method_on_paper(said: dict[str, Any], of_a_matrix: Any) -> None:
    model = memory("llama", said)
    weights = model.weights
    wanted = 2 * sum(of_a_matrix(*shape) for shape in MATRICES.values())
    assert weights.quantised == 2 * sum(rows * columns for rows, columns in MATRICES.values())
    assert weights.quantised_bytes == wanted
    assert weights.bytes - buffers(model) == wanted + 2 * OTHERS


def test_modules_that_are_left_out_are_not_quantised() -> None:
    layer = sum(rows * columns for rows, columns in MATRICES.values())

    def quantised(**said: Any) -> int:
        return memory("llama", {**GROUP, **said}).weights.quantised

    assert quantised(quant_method="awq") == 2 * layer
    assert quantised(quant_method="awq", modules_to_not_convert=["o_proj"]) == 2 * layer - 2 * 96**2
    named = ["model.layers.1.self_attn"]  # and not layers 10 to 19
    assert quantised(quant_method="awq", modules_to_not_convert=named) == 2 * layer - 96 * 288
    of_images = ["model.language_model.layers.1.mlp.up_proj"]
    assert quantised(quant_method="awq", modules_to_not_convert=of_images) == 2 * layer - 160 * 96
    assert quantised(quant_method="gptq", dynamic={r"-:.*\.mlp\.": {}}) == 2 * 96 * 288
    said = compressed("pack-quantized") | {"ignore": ["lm_head", r"re:.*self_attn\.[qkv]_proj$"]}
    assert memory("llama", said).weights.quantised == 2 * (layer - 96 * 192)


@pytest.mark.parametrize("said", [None, {"quant_method": "fp8", "dequantize": True}])
def test_without_it_weights_are_in_the_precision_that_is_asked_for(said: object) -> None:
    model = memory("llama", said)
    assert model.weights.method is None
    assert model.weights.bytes == sum(
        each.nbytes for each in (*model._model.parameters(), *model._model.buffers())
    )


@pytest.mark.parametrize(
    "said",
    [
        {"quant_method": "aqlm"},
        {"bits": 4},
        {"quant_method": "gptq"},
        {"quant_method": "gptq", **GROUP, "lm_head": True},
        {"quant_method": "gptq", **GROUP, "dynamic": {"+:.*up.*": {"bits": 8}}},
        {"quant_method": "awq", "bits": "four"},
        {"quant_method": "fp8", "expert_dtype": "fp4"},
        {"quant_method": "fp8", "weight_block_size": [128]},
        compressed("marlin-24"),
        compressed("pack-quantized", group_size=None),
        {**compressed("pack-quantized"), "sparsity_config": {"format": "sparse-24-bitmask"}},
        {**compressed("pack-quantized"), "config_groups": {}},
    ],
)
def test_what_is_not_known_names_the_option(said: dict[str, Any]) -> None:
    config = AutoConfig.for_model("llama", **SIZES, quantization_config=said)
    with pytest.raises(
        ValueError, match="--weights must be given for tiny, since its configuration"
    ):
        method_of(config, "tiny")


def test_experts_under_bitsandbytes_are_not_guessed() -> None:
    said = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    model = memory("qwen3_moe", said, num_experts=4, moe_intermediate_size=64)
    with pytest.raises(ValueError, match="--weights must be given for tiny"):
        _ = model.weights


def test_the_command_counts_names_and_asks(run: Run, tmp_path: Path) -> None:
    llama = {"model_type": "llama", **SIZES, "max_position_embeddings": 512}
    file = tmp_path / "config.json"
    asked = ("--config", tmp_path, "--context", 64, "-p", "snapkv", "--memory", "1GB")

    file.write_text(json.dumps({**llama, "quantization_config": {"quant_method": "gptq", **GROUP}}))
    status, shown, err = run(*asked, "--json", tmp_path / "out.json")
    assert (status, err) == (0, "")
    found = json.loads((tmp_path / "out.json").read_text())["memory"]
    assert found["quantised_by"] == "GPTQ of 4 bits"
    model = memory("llama", {"quant_method": "gptq", **GROUP}, max_position_embeddings=512)
    assert found["weights"] == model.weights.bytes
    bits = 8 * model.weights.quantised_bytes / model.weights.quantised
    assert f"of the parameters in GPTQ of 4 bits, {bits:.2f} bits each" in " ".join(shown.split())
    assert max(map(len, shown.split("\nwritten")[0].splitlines())) <= 80

    file.write_text(json.dumps({**llama, "quantization_config": {"quant_method": "aqlm"}}))
    status, shown, err = run(*asked)
    assert (status, shown) == (1, "")
    assert err == (
        f"error: --weights must be given for {tmp_path}, since its configuration says that aqlm "
        "quantises the weights, but not how many bytes they take; give the size of its files\n"
    )
    status, shown, err = run(*asked, "--weights", "1MB")
    assert (status, err) == (0, "")
    assert "weights 1 MB" in shown
    assert run(*asked[:-2])[0] == 0  # without --memory nobody asks for the weights


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Hub's cache with one model's configuration, and none for another that was looked for."""
    commit = "a" * 40
    content = {"model_type": "llama", **SIZES, "max_position_embeddings": 512}
    for name, folder in (("there", "snapshots"), ("without", ".no_exist")):
        model = tmp_path / f"models--own--{name}"
        (model / "refs").mkdir(parents=True)
        (model / "refs" / "main").write_text(commit)
        (model / folder / commit).mkdir(parents=True)
        text = json.dumps(content) if name == "there" else ""
        (model / folder / commit / "config.json").write_text(text)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_a_name_on_the_hub_that_the_cache_holds(
    cache: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr("socket.socket.connect", no_network)
    shape = load_shape("own/there")
    assert (shape.name, shape.num_layers, shape.hidden_size) == ("own/there", 2, 96)
    assert sum(layer.weights for layer in shape.layers) == 2 * sum(
        rows * columns for rows, columns in MATRICES.values()
    )
    status, shown, err = run("--config", "own/there", "--context", 64, "-p", "snapkv")
    assert (status, err) == (0, "")
    assert shown.startswith("model own/there\n")
    for name in ("own/elsewhere", "own/without"):
        status, shown, err = run("--config", name, "--context", 64)
        assert (status, shown) == (1, "")
        assert err.endswith(
            f"or the Hub name of a model in the local cache, got '{name}'; if it is on the Hub, "
            f"download it with: hf download {name} config.json\n"
        )


@pytest.mark.parametrize("name", ["./x", "a/b/c", "own/x--y", "two words"])
def test_what_is_no_name_is_not_to_be_downloaded(cache: Path, name: str) -> None:
    with pytest.raises(ValueError, match="config must be a preset") as error:
        load_shape(name)
    assert ("hf download" in str(error.value)) == (name == "own/x--y")
