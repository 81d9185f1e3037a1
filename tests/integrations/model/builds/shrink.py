"""Any configuration of Transformers at a tiny size, by the names of its fields."""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

from tests.integrations.model.builds.patches import PATCHES
from tests.integrations.model.builds.sizes import (
    DROPOUTS,
    FIRST_SPECIAL_ID,
    HEAD_DIM,
    HEADS,
    LAYERS,
    SIDE_SIZES,
    SIZES,
)

# Parts of a configuration that are of the decoder.
_DECODERS = frozenset(
    {"attn_config", "decoder", "ffn_config", "generator", "llm_config", "text_config"}
)
_DEFAULT_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
_AS_IS = object()  # what a configuration has by default


def shrunk(config_class: Any, *, side: bool = False, **patch: Any) -> dict[str, Any]:
    """Arguments for a tiny configuration of a class.

    Args:
        config_class: of Transformers.
        side: whether it is of something beside the decoder, such as an image encoder.
        patch: fields in the place of what the names say; a dictionary for a part's configuration
            is merged into what is made for the part.

    Returns:
        By name; the parts' configurations are objects.
    """
    patch = {**PATCHES.get(config_class.model_type, {}), **patch}
    default = config_class()
    special = itertools.count(FIRST_SPECIAL_ID)
    fields: dict[str, Any] = {}
    for name in config_class.__dataclass_fields__:
        value = _read(default, name)
        if hasattr(value, "sub_configs"):
            beside = side or name not in _DECODERS
            part = shrunk(type(value), side=beside, **patch.pop(name, {}))
            fields[name] = type(value)(**part)
        elif name not in patch:
            fields[name] = _field(name, value, default, special, side=side)
    if fields.get("kv_lora_rank", _AS_IS) not in (_AS_IS, None) and "num_key_value_heads" in fields:
        fields["num_key_value_heads"] = HEADS  # latent attention makes keys for every head
    return {**{name: each for name, each in fields.items() if each is not _AS_IS}, **patch}


def _field(name: str, value: Any, config: Any, special: Iterator[int], *, side: bool) -> Any:
    """What a field is to be, of which a configuration has a value by default."""
    if name.endswith(("_token_id", "_token_index")):
        return _token_id(name, value, special)
    if name in ("tie_word_embeddings", "use_cache", "is_decoder"):
        return name != "tie_word_embeddings"
    if name in ("num_key_value_heads", "head_dim") and value is None and not side:
        return SIZES[name]
    if name in DROPOUTS and value is not None:
        return 0.0
    if name in SIDE_SIZES and value is not None and side:
        return SIDE_SIZES[name]
    if name in SIZES and isinstance(value, int):
        return SIZES[name]
    if isinstance(value, list | tuple) and not side:  # one for each layer?
        each_layer = value and len(value) == _read(config, "num_hidden_layers")
        return _short(list(value)) if each_layer else _AS_IS
    if name == "rope_parameters" and not side:
        axes = getattr(config, "ignore_keys_at_rope_validation", None) or ()
        if "mrope_section" in axes:
            value = {"mrope_section": [1, 1, 1], **(value or _DEFAULT_ROPE)}
        return _rope(value) if isinstance(value, dict) else _AS_IS
    return _AS_IS


def _token_id(name: str, value: Any, special: Iterator[int]) -> Any:
    if name in ("bos_token_id", "eos_token_id"):
        return None
    if name == "pad_token_id":
        return 0
    if name.startswith(("decoder_start", "forced_", "sep")):
        return 1
    return next(special) if isinstance(value, int) else _AS_IS


def _short(kinds: list[Any]) -> list[Any]:
    """As many layers' kinds in turn, so that each is among the first."""
    distinct = [kind for i, kind in enumerate(kinds) if kind not in kinds[:i]]
    return [distinct[i % len(distinct)] for i in range(LAYERS)]


def _read(config: Any, name: str) -> Any:
    with contextlib.suppress(Exception):  # some fields differ from layer to layer
        return getattr(config, name)
    return getattr(type(config), name, None)


def _rope(value: dict[str, Any]) -> dict[str, Any]:
    """Parameters of a rotary embedding, with sections of several axes for heads of `HEAD_DIM`."""
    if all(isinstance(each, dict) for each in value.values()):
        return {kind: _rope(each) for kind, each in value.items()}
    sections = value.get("mrope_section")
    if not sections:
        return value
    half = int(HEAD_DIM * value.get("partial_rotary_factor", 1.0)) // 2
    rest = half // 4 if len(sections) == 3 else half // len(sections)
    others = [rest] * (len(sections) - 1)
    return {**value, "mrope_section": [half - sum(others), *others]}
