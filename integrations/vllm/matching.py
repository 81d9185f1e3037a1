"""Tell if a document was read by the model that is served, from its configuration and weights."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kvpolicy.integrations.transformers.state.fingerprint import ModelFingerprint, sampled

# Settings on which keys and values depend, and that every version of Transformers names alike.
SETTINGS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
)
ROPE = "rope_parameters"
# The parameters that are compared: keys depend on them, and they are small.
COMPARED = ("k_proj.weight", "qkv_proj.weight", "query_key_value.weight")


def misfit(model: ModelFingerprint, hf_config: Any, checkpoint: Path | None = None) -> str | None:
    """Return why a document that ``model`` has read does not fit a served model; None if it does.

    Without the served model's ``checkpoint``, a folder, only configurations are compared.
    """
    config = hf_config.get_text_config().to_dict()
    for name in SETTINGS:
        was, got = model.config.get(name), config.get(name)
        if was != got and None not in (was, got):
            return f"{name} of its model is {was}, that of the served model {got}"
    was, got = model.config.get(ROPE) or {}, config.get(ROPE) or {}
    for name in sorted(was.keys() & got.keys()):
        if was[name] != got[name]:
            return f"{ROPE}[{name!r}] of its model is {was[name]}, of the served model {got[name]}"
    return None if checkpoint is None else _other_weights(model, checkpoint)


def _other_weights(model: ModelFingerprint, checkpoint: Path) -> str | None:
    """Describe the first parameter whose values differ from those in a folder; None if none do."""
    names = [name for name in model.parameters if name.endswith(COMPARED)]
    known = {name: model.parameters[name] for name in (*names[:1], *names[-1:])}
    found = {}
    for name in known:
        try:
            tensor = _weight(checkpoint, name)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            return f"{name} cannot be read from {checkpoint}: {error}"
        if tensor is not None:
            found[name] = sampled(tensor)
    own = {name: known[name] for name in found}
    return ModelFingerprint({}, own).difference(ModelFingerprint({}, found))


def _weight(checkpoint: Path, name: str) -> torch.Tensor | None:
    """Read a parameter of a decoder from a checkpoint; None if there is none by this name."""
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                if key == name or key.endswith(f".{name}"):
                    tensor: torch.Tensor = file.get_tensor(key)
                    return tensor
    return None
