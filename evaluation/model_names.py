"""Distinguish Hub names of models from folders, without a network."""

import os
import re
from pathlib import Path

# The form of a name on the Hugging Face Hub: "model" or "owner/model".
_HUB_NAME = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?", re.ASCII)


def check_model_name(name: str) -> str:
    """Return what Transformers loads a model by, after what can be checked without a network.

    A name such as ``models/llama`` could be a folder or the Hub's. If there is a folder ``models``
    here, it counts as a folder, unless the Hub's model of that name was downloaded before. A path
    that is no folder of a model is a ValueError.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(
                f"model folder {name} must hold a config.json as save_pretrained writes it, "
                "got none"
            )
        return str(path)
    if path.exists():
        raise ValueError(f"model {name} must be a folder as save_pretrained writes it, got a file")
    if not is_hub_name(name):
        raise ValueError(
            f"model {name} does not exist; give a folder, or a Hub name such as owner/model"
        )
    if os.sep in name and path.parent.is_dir() and cached_config(name) is None:
        raise ValueError(
            f"model {name} does not exist in the local folder {path.parent}; for the Hub's model "
            f"of this name, run the command in a folder that has no {path.parent}"
        )
    return name


def is_hub_name(name: str) -> bool:
    """Return True if the Hugging Face Hub could have a model of this name."""
    return _HUB_NAME.fullmatch(name) is not None


def cached_config(name: str) -> Path | None:
    """Return the ``config.json`` of a Hub model from the local cache; None if it is not cached."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # such as a name with "--" in it, which the Hub does not allow
        return None
    return Path(found) if isinstance(found, str) else None
