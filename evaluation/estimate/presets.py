"""List published models by name, with sizes from their configurations on the Hub."""

from typing import Any

import attrs

from kvpolicy.checks import check_kind


@attrs.frozen
class Preset:
    """A published model: Transformers' word for its family, sizes, and names on the Hub.

    The sizes are what its configuration has otherwise than the family's has by default.
    """

    model_type: str
    sizes: dict[str, Any]
    hub_names: tuple[str, ...]


# The sizes that `_dense` takes.
_DENSE = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)


def _dense(model_type: str, sizes: tuple[int, ...], *hub_names: str, **more: Any) -> Preset:
    """Make a preset from `_DENSE`; heads are 128 wide and see all tokens if no more is said."""
    usual = {"head_dim": 128, "sliding_window": None, "pad_token_id": None}
    return Preset(model_type, {**dict(zip(_DENSE, sizes, strict=True)), **usual, **more}, hub_names)


def _gpt_oss(layers: int, experts: int, hub_name: str) -> Preset:
    sizes = {"num_hidden_layers": layers, "num_local_experts": experts}
    return Preset("gpt_oss", sizes, (hub_name,))


# Three of four layers of Ministral have a window of 32,768 tokens; here they see all tokens, as in
# FastKV's experiments.
PRESETS: dict[str, Preset] = {
    "llama-3.1-8b": _dense(
        *("llama", (32, 4096, 14336, 32, 8, 128256, 131072)),
        *("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct"),
        *("meta-llama/Meta-Llama-3.1-8B", "meta-llama/Meta-Llama-3.1-8B-Instruct"),
    ),
    "llama-3.1-70b": _dense(
        *("llama", (80, 8192, 28672, 64, 8, 128256, 131072)),
        *("meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-70B-Instruct"),
        *("meta-llama/Meta-Llama-3.1-70B", "meta-llama/Meta-Llama-3.1-70B-Instruct"),
    ),
    "ministral-8b": _dense(
        *("mistral", (36, 4096, 12288, 32, 8, 131072, 131072)),
        "mistralai/Ministral-8B-Instruct-2410",
    ),
    "mistral-nemo-12b": _dense(
        *("mistral", (40, 5120, 14336, 32, 8, 131072, 131072)),
        *("mistralai/Mistral-Nemo-Base-2407", "mistralai/Mistral-Nemo-Instruct-2407"),
    ),
    "mistral-small-24b": _dense(
        *("mistral", (40, 5120, 32768, 32, 8, 131072, 32768)),
        "mistralai/Mistral-Small-24B-Base-2501",
        "mistralai/Mistral-Small-24B-Instruct-2501",
    ),
    "phi-4": _dense("phi3", (40, 5120, 17920, 40, 10, 100352, 16384), "microsoft/phi-4"),
    "qwen3-8b": _dense(
        *("qwen3", (36, 4096, 12288, 32, 8, 151936, 40960)), "Qwen/Qwen3-8B", "Qwen/Qwen3-8B-Base"
    ),
    "qwen3-32b": _dense("qwen3", (64, 5120, 25600, 64, 8, 151936, 40960), "Qwen/Qwen3-32B"),
    "gpt-oss-20b": _gpt_oss(24, 32, "openai/gpt-oss-20b"),
    "gpt-oss-120b": _gpt_oss(36, 128, "openai/gpt-oss-120b"),
    "gemma-3-27b": _dense(
        *("gemma3_text", (62, 5376, 21504, 32, 16, 262208, 131072)),
        *("google/gemma-3-27b-it", "google/gemma-3-27b-pt"),
        sliding_window=1024,
    ),
    "gemma-4-26b": _dense(
        *("gemma4_text", (30, 2816, 2112, 16, 8, 262144, 262144)),
        *("google/gemma-4-26B-A4B", "google/gemma-4-26B-A4B-it"),
        num_global_key_value_heads=2,
        head_dim=256,
        global_head_dim=512,
        attention_k_eq_v=True,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
        hidden_size_per_layer_input=0,
        sliding_window=1024,
    ),
    "qwen3.6-35b-a3b": Preset(
        "qwen3_5_moe_text",
        {"max_position_embeddings": 262144},
        ("Qwen/Qwen3.6-35B-A3B", "Qwen/Qwen3.5-35B-A3B"),
    ),
    "deepseek-v3": Preset(
        "deepseek_v3",
        {"max_position_embeddings": 163840},
        ("deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V3-0324", "deepseek-ai/DeepSeek-R1"),
    ),
}

_BY_HUB_NAME = {
    spelling.lower(): name
    for name, preset in PRESETS.items()
    for hub_name in preset.hub_names
    for spelling in (hub_name, hub_name.partition("/")[2])
}


def preset_name(name: str) -> str | None:
    """Return the preset of a preset's or Hub name, in upper or lower case; None for others."""
    check_kind("name", name, str)
    lower = name.lower()
    return lower if lower in PRESETS else _BY_HUB_NAME.get(lower)
