"""Shapes of models: published ones by name, others read from a configuration without weights."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvpolicy.checks import check_kind
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.evaluation.cost.model_shape import ModelShape, gated_mlp, mixture_mlp, plain_mlp
from kvpolicy.evaluation.cost.presets import PRESETS, preset_named


def load_shape(name: str) -> ModelShape:
    """Find a preset, or read a configuration from the disk; neither network nor weights are used.

    Args:
        name: A preset or its name on the Hugging Face Hub, in upper or lower case; a folder with a
            ``config.json``; or such a file.

    Raises:
        TypeError: ``name`` is not a str.
        ValueError: It is none of these; lists the presets. Or the configuration cannot be read.
        UnsupportedModelError: See `shape_of`.

    Example:
        >>> load_shape("Ministral-8B").num_layers, load_shape("Qwen/Qwen3-32B").num_layers
        (36, 64)
    """
    check_kind("name", name, str)
    preset = preset_named(name)
    return shape_of(_read_config(name), name) if preset is None else preset


def shape_of(config: Any, name: str = "model") -> ModelShape:
    """The shape of a model of Transformers by its configuration.

    Args:
        config: A configuration of Transformers; one of several modalities counts as its text
            decoder.
        name: What to call the shape.

    Raises:
        TypeError: ``config`` is no configuration.
        UnsupportedModelError: The family's layers are not known, or a size is missing.
    """
    if not hasattr(config, "get_text_config"):
        raise TypeError(f"config must be a configuration of Transformers, got {config!r}")
    text = config.get_text_config(decoder=True)
    family = FAMILIES.get(text.model_type)
    if family is None:
        raise UnsupportedModelError(
            f"model_type of {name} must be one whose layers are known, {', '.join(FAMILIES)}, got "
            f"{text.model_type!r}; describe it by a ModelShape"
        )
    _check_layers(text, name)
    heads, hidden = _size(text, name, "num_attention_heads"), _size(text, name, "hidden_size")
    layers, vocab_size = _size(text, name, "num_hidden_layers"), _size(text, name, "vocab_size")
    mlp_weights = tuple(family(text, name, index) for index in range(layers))
    try:
        return ModelShape(
            name=name,
            hidden_size=hidden,
            query_heads=heads,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or hidden // heads,
            mlp_weights=mlp_weights,
            vocab_size=vocab_size,
            max_positions=getattr(text, "max_position_embeddings", None),
            windows=_windows(text, layers),
        )
    except (TypeError, ValueError) as error:
        raise UnsupportedModelError(f"configuration of {name} is not usable: {error}") from None


def _gated(config: Any, name: str, layer_idx: int) -> int:
    return gated_mlp(_size(config, name, "hidden_size"), _size(config, name, "intermediate_size"))


def _plain(config: Any, name: str, layer_idx: int) -> int:
    return plain_mlp(_size(config, name, "hidden_size"), _size(config, name, "intermediate_size"))


def _mixture(config: Any, name: str, layer_idx: int) -> int:
    """The active experts, those that all tokens share, and the router."""
    step = getattr(config, "decoder_sparse_step", 1)
    if layer_idx in (getattr(config, "mlp_only_layers", None) or ()) or (layer_idx + 1) % step:
        return _gated(config, name, layer_idx)
    hidden = _size(config, name, "hidden_size")
    own = hasattr(config, "moe_intermediate_size")
    width = _size(config, name, "moe_intermediate_size" if own else "intermediate_size")
    local = hasattr(config, "num_local_experts")
    experts = _size(config, name, "num_local_experts" if local else "num_experts")
    shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    active = _size(config, name, "num_experts_per_tok")
    return mixture_mlp(hidden, width, active=active, experts=experts, shared=shared)


# By model_type, how to count the weights of a layer's MLP; all have plain attention projections.
FAMILIES: dict[str, Callable[[Any, str, int], int]] = {
    **dict.fromkeys(
        (
            *("llama", "mistral", "ministral", "ministral3", "qwen2", "qwen3", "gemma", "gemma2"),
            *("gemma3_text", "phi3", "granite", "olmo", "olmo2", "olmo3", "cohere", "cohere2"),
            *("stablelm", "smollm3", "helium", "exaone4", "glm", "glm4", "seed_oss", "ernie4_5"),
        ),
        _gated,
    ),
    **dict.fromkeys(
        ("phi", "starcoder2", "nemotron", "gpt_neox", "persimmon", "arcee", "apertus"), _plain
    ),
    **dict.fromkeys(
        ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "granitemoe", "gpt_oss"), _mixture
    ),
}


def _read_config(name: str) -> Any:
    path = Path(name).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        if path.is_dir():
            raise ValueError(f"config folder {name} must hold a config.json, got none")
        raise ValueError(
            f"config must be a preset ({', '.join(PRESETS)}), its name on the Hub, a folder with a "
            f"config.json or such a file, got {name!r}"
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"config {name} must be JSON in UTF-8: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise ValueError(f"config {name} must be a JSON object with a model_type, got none")

    from transformers import AutoConfig

    try:
        # No code of the folder's own is run, and nothing is asked for.
        return AutoConfig.from_pretrained(file, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever the family's own checks raise
        reason = textwrap.shorten(str(error), 200) or type(error).__name__
        raise ValueError(f"config {name} could not be read: {reason}") from error


def _size(config: Any, name: str, attribute: str) -> int:
    size = getattr(config, attribute, None)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise UnsupportedModelError(
            f"{attribute} of {name} must be an int of at least 1, got {size!r}"
        )
    return size


def _check_layers(config: Any, name: str) -> None:
    kinds = set(getattr(config, "layer_types", None) or ())
    unknown = sorted(kinds - {"full_attention", "sliding_attention"})
    if unknown:
        raise UnsupportedModelError(
            f"layer_types of {name} must be full_attention or sliding_attention, got "
            f"{', '.join(unknown)}"
        )


def _windows(config: Any, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer; empty where all see all."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * num_layers
    if window is None or "sliding_attention" not in kinds:
        return ()
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
