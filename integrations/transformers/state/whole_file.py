"""Write a safetensors file completely or not at all, and tell if a tensor in it was changed."""

import hashlib
import os
import stat
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


def check_target(path: str | os.PathLike[str]) -> tuple[Path, int | None]:
    """Return the regular file to write, with links resolved, and its file mode if it exists."""
    if not os.fspath(path):
        raise ValueError(f"path must name a file, got {path!r}")
    target = Path(os.path.realpath(path))
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        return target, None
    if not stat.S_ISREG(mode):
        raise OSError(f"path must be a regular file or a new one, got {path}")
    return target, stat.S_IMODE(mode)


def write_whole(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file; after a crash, either the old file or the new one is there."""
    target, mode = check_target(path)
    new = target.with_name(f".saving-{uuid.uuid4().hex}")
    os.close(os.open(new, os.O_CREAT | os.O_EXCL, 0o666 if mode is None else mode | 0o600))
    try:
        save_file(dict(tensors), new, dict(metadata))
        if mode is not None:
            os.chmod(new, mode)
        _sync(new)
        os.replace(new, target)
    except BaseException:
        os.unlink(new)
        raise
    _sync(target.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def bytes_of(tensor: Tensor) -> Any:
    """Return the bytes of a contiguous CPU tensor as an array that shares its memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def digest_of(tensor: Tensor) -> str:
    """Return the SHA-256 of a contiguous CPU tensor's dtype, shape and values."""
    found = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
    found.update(bytes_of(tensor))
    return found.hexdigest()
