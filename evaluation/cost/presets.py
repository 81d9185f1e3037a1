"""Published models by name: their shapes, as their configurations on the Hub have them."""

from __future__ import annotations

from kvpolicy.evaluation.cost.model_shape import ModelShape, gated_mlp, mixture_mlp


def _dense(
    name: str, layers: int, hidden: int, width: int, heads: tuple[int, int], vocab: int, most: int
) -> ModelShape:
    """A model of equal layers with heads of 128."""
    return ModelShape(
        name=name,
        hidden_size=hidden,
        query_heads=heads[0],
        kv_heads=heads[1],
        head_dim=128,
        mlp_weights=(gated_mlp(hidden, width),) * layers,
        vocab_size=vocab,
        max_positions=most,
    )


def _gpt_oss(name: str, layers: int, experts: int) -> ModelShape:
    """Every second layer, from the first, sees 128 tokens; 4 experts are active."""
    return ModelShape(
        name=name,
        hidden_size=2880,
        query_heads=64,
        kv_heads=8,
        head_dim=64,
        mlp_weights=(mixture_mlp(2880, 2880, active=4, experts=experts),) * layers,
        vocab_size=201088,
        max_positions=131072,
        windows=(128, None) * (layers // 2),
    )


# Ministral's three layers of four with a window of 32,768 tokens see all here, as in FastKV's
# experiments.
PRESETS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _dense("llama-3.1-8b", 32, 4096, 14336, (32, 8), 128256, 131072),
        _dense("llama-3.1-70b", 80, 8192, 28672, (64, 8), 128256, 131072),
        _dense("ministral-8b", 36, 4096, 12288, (32, 8), 131072, 131072),
        _dense("mistral-nemo-12b", 40, 5120, 14336, (32, 8), 131072, 131072),
        _dense("mistral-small-24b", 40, 5120, 32768, (32, 8), 131072, 32768),
        _dense("phi-4", 40, 5120, 17920, (40, 10), 100352, 16384),
        _dense("qwen3-8b", 36, 4096, 12288, (32, 8), 151936, 40960),
        _dense("qwen3-32b", 64, 5120, 25600, (64, 8), 151936, 40960),
        _gpt_oss("gpt-oss-20b", 24, experts=32),
        _gpt_oss("gpt-oss-120b", 36, experts=128),
        ModelShape(
            name="gemma-3-27b",
            hidden_size=5376,
            query_heads=32,
            kv_heads=16,
            head_dim=128,
            mlp_weights=(gated_mlp(5376, 21504),) * 62,
            vocab_size=262208,
            max_positions=131072,
            windows=tuple(None if layer % 6 == 5 else 1024 for layer in range(62)),
        ),
    )
}

# Names on the Hub other than the preset's own with an owner before it.
_HUB_NAMES: dict[str, tuple[str, ...]] = {
    "llama-3.1-8b": (
        *("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct"),
        *("meta-llama/Meta-Llama-3.1-8B", "meta-llama/Meta-Llama-3.1-8B-Instruct"),
    ),
    "llama-3.1-70b": (
        *("meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-70B-Instruct"),
        *("meta-llama/Meta-Llama-3.1-70B", "meta-llama/Meta-Llama-3.1-70B-Instruct"),
    ),
    "ministral-8b": ("mistralai/Ministral-8B-Instruct-2410",),
    "mistral-nemo-12b": (
        *("mistralai/Mistral-Nemo-Base-2407", "mistralai/Mistral-Nemo-Instruct-2407"),
    ),
    "mistral-small-24b": (
        *("mistralai/Mistral-Small-24B-Base-2501", "mistralai/Mistral-Small-24B-Instruct-2501"),
    ),
    "phi-4": ("microsoft/phi-4",),
    "qwen3-8b": ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B-Base"),
    "qwen3-32b": ("Qwen/Qwen3-32B",),
    "gpt-oss-20b": ("openai/gpt-oss-20b",),
    "gpt-oss-120b": ("openai/gpt-oss-120b",),
    "gemma-3-27b": ("google/gemma-3-27b-it", "google/gemma-3-27b-pt"),
}
_BY_HUB_NAME = {
    spelling.lower(): PRESETS[preset]
    for preset, names in _HUB_NAMES.items()
    for name in names
    for spelling in (name, name.partition("/")[2])
}


def preset_named(name: str) -> ModelShape | None:
    """The preset of a name, or of a name on the Hub, in upper or lower case; None for another.

    Example:
        >>> preset_named("meta-llama/Llama-3.1-8B-Instruct") is PRESETS["llama-3.1-8b"]
        True
    """
    return PRESETS.get(name.lower()) or _BY_HUB_NAME.get(name.lower())
