"""Tell names of models on the Hugging Face Hub from folders, without a network."""

from __future__ import annotations

import os
import re
from pathlib import Path

from kvpolicy.evaluation.defaults import BUNDLED

# What the Hugging Face Hub takes for a name: "model" or "owner/model".
_HUB_NAME = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?", re.ASCII)


def check_model_name(name: str) -> str:
    """Check a model's name as far as that needs no network.

    A name such as ``models/llama`` could be a folder or the Hub's. If there is a folder ``models``
    here, it counts as a folder, unless the Hub's model of that name was downloaded before.

    Args:
        name: As for `kvpolicy.evaluation.load`.

    Returns:
        What Transformers loads it by: a folder without ``~``, or the name.

    Raises:
        ValueError: It is a path, and no folder of a model.
    """
    if name in BUNDLED:
        return name
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
    if not _HUB_NAME.fullmatch(name):
        raise ValueError(
            f"model {name} does not exist; give a folder, a Hub name such as owner/model, or "
            f"{' or '.join(BUNDLED)} for a bundled model"
        )
    if os.sep in name and path.parent.is_dir() and not _downloaded(name):
        raise ValueError(
            f"model {name} does not exist in the folder {path.parent} that is here; for the Hub's "
            f"model of this name, start from a folder without {path.parent}"
        )
    return name


def _downloaded(name: str) -> bool:
    """Return True if a model of the Hub is in its local cache."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json"), str)
