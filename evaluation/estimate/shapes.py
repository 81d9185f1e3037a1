"""Load the shapes of models: published ones by name, others from a configuration."""

import functools
import json
import textwrap
from pathlib import Path
from typing import Any

import torch

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.evaluation.estimate.model_shape import ModelShape
from kvpolicy.evaluation.estimate.presets import PRESETS, preset_name
from kvpolicy.evaluation.model_names import cached_config, is_hub_name


def load_shape(name: str, dtype: torch.dtype = torch.bfloat16) -> ModelShape:
    """Load a model's layer sizes from a preset or a configuration on disk, without network.

    The name is a preset's or that on the Hugging Face Hub, in upper or lower case; a folder with a
    ``config.json``; such a file; or any name on the Hub that the local cache holds. It is a
    ValueError if it is none of these, or the configuration cannot be read; else see `shape_of`.

    Example:
        >>> load_shape("Ministral-8B").num_layers, load_shape("Qwen/Qwen3-32B").num_layers
        (36, 64)
    """
    preset = preset_name(name)
    if preset is None:
        return shape_of(_read_config(name), name, dtype)
    return _preset_shape(preset, dtype)


@functools.cache
def _preset_shape(name: str, dtype: torch.dtype) -> ModelShape:
    return shape_of(load_config(name), name, dtype)


def load_config(name: str) -> Any:
    """Load a model's Transformers configuration; see `load_shape` for names and errors."""
    preset = preset_name(name)
    if preset is None:
        return _read_config(name)
    from transformers import AutoConfig

    return AutoConfig.for_model(PRESETS[preset].model_type, **PRESETS[preset].sizes)


def shape_of(config: Any, name: str = "model", dtype: torch.dtype = torch.bfloat16) -> ModelShape:
    """Return a model's layer sizes, from its Transformers configuration.

    Args:
        config: A configuration of Transformers; one of several modalities counts as its text
            decoder.
        name: What to call the shape.
        dtype: Of weights, keys and values, and of states that have no dtype of their own.

    Raises:
        TypeError: ``config`` is no configuration, or ``dtype`` no dtype.
        UnsupportedModelError: Transformers cannot make a decoder of it, or one whose layers hold
            keys and values.
    """
    if not hasattr(config, "get_text_config"):
        raise TypeError(f"config must be a configuration of Transformers, got {config!r}")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype such as torch.bfloat16, got {dtype!r}")
    from kvpolicy.evaluation.estimate.tracing import trace  # which needs Transformers

    text = config.get_text_config(decoder=True)
    layers = getattr(text, "num_hidden_layers", None)
    if isinstance(layers, bool) or not isinstance(layers, int) or layers < 1:
        raise UnsupportedModelError(
            f"num_hidden_layers of {name} must be an int of at least 1, got {layers!r}"
        )
    most = getattr(text, "max_position_embeddings", None)
    return ModelShape(name, *trace(config, name, dtype), most)


def _read_config(name: str) -> Any:
    file = _config_file(name)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"config {name} must be JSON in UTF-8: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise ValueError(f"config {name} must be a JSON object with a model_type, got none")

    from transformers import AutoConfig

    try:
        # No code from the folder is run, and the user is asked nothing.
        return AutoConfig.from_pretrained(file, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # any error of the family's own checks
        reason = textwrap.shorten(str(error), 200) or type(error).__name__
        raise ValueError(f"config {name} could not be read: {reason}") from error


def _config_file(name: str) -> Path:
    """Return the ``config.json`` that a name stands for: a folder's, a file, or a cached one."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"config folder {name} must hold a config.json, got none")
        return path / "config.json"
    cached = cached_config(name) if is_hub_name(name) else None
    if cached is None:
        remedy = f"; if it is on the Hub, download it with: hf download {name} config.json"
        raise ValueError(
            f"config must be a preset ({', '.join(PRESETS)}), a preset's Hub name, a folder with "
            "a config.json, the file itself, or the Hub name of a model in the local cache, got "
            f"{name!r}{remedy if is_hub_name(name) else ''}"
        )
    return cached
