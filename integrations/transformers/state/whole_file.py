"""Write a safetensors file completely or not at all."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def check_target(path: str | os.PathLike[str]) -> tuple[Path, int]:
    """Return the regular file to write, with links resolved, and its file mode.

    Raises:
        OSError: ``path`` exists and is not a regular file.
        ValueError: ``path`` is empty.
    """
    if not os.fspath(path):
        raise ValueError(f"path must name a file, got {path!r}")
    target = Path(os.path.realpath(path))
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        return target, _mode_of_new_files()
    if not stat.S_ISREG(mode):
        raise OSError(f"path must be a regular file or a new one, got {path}")
    return target, stat.S_IMODE(mode)


def write_whole(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file; after a crash, either the old file or the new one is there.

    Args:
        path: The file; it is replaced if it exists.
        tensors: Contiguous tensors in CPU memory.
        metadata: The strings of the file's header.

    Raises:
        OSError: The file cannot be written, or ``path`` exists and is not a regular file.
        ValueError: ``path`` is empty.
    """
    target, mode = check_target(path)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=".saving-")
    os.close(handle)
    try:
        save_file(dict(tensors), name, dict(metadata))
        os.chmod(name, mode)
        _sync(name)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise
    _sync(target.parent)


def _mode_of_new_files() -> int:
    """Return the file mode that the process's umask gives to new files.

    It is needed since a temporary file can be read by its owner only.
    """
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask


def _sync(path: str | Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
