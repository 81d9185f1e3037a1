"""Read parts of a safetensors file without memory-mapping it.

A mapped file that someone cuts short kills the process that reads it. A plain read only comes back
short, which is an error that names the file. So a server reads documents with plain reads.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.errors import KVPolicyError
from kvpolicy.integrations.transformers.state.whole_file import bytes_of

# The names of safetensors' dtypes that documents use.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U8": torch.uint8,
}
LARGEST_HEADER = 100_000_000  # as in safetensors


class DocumentError(KVPolicyError):
    """Raised if a served document cannot be found, read or used; gives the reason."""


@attrs.frozen
class _Entry:
    """The place of a tensor in a file: dtype, shape and first byte."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class TensorFile:
    """An open safetensors file, from which tensors or some of their rows are read.

    It goes on reading the same file if another one takes its name. Use it in a `with` block. A
    DocumentError says that the file cannot be read, or is not a whole safetensors file.

    Attributes:
        metadata: The strings of the header.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._handle = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DocumentError(f"{path.name} cannot be read: {error.strerror}") from None
        try:
            self.metadata, self._entries = self._header()
        except BaseException:
            os.close(self._handle)
            raise

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *ended: object) -> None:
        os.close(self._handle)

    def read(self, name: str, rows: slice = slice(None)) -> Tensor:
        """Read a tensor, or only some indices of its first axis."""
        if name not in self._entries:
            raise DocumentError(f"{self.path.name} is no whole document: it lacks {name}")
        entry = self._entries[name]
        count, *others = entry.shape
        first, last, _ = rows.indices(count)
        found = torch.empty(last - first, *others, dtype=entry.dtype)
        row = math.prod(others) * entry.dtype.itemsize
        try:
            if found.numel():
                self._fill(memoryview(bytes_of(found)), entry.start + first * row)
        except OSError as error:
            raise DocumentError(f"{self.path.name} cannot be read: {error.strerror}") from None
        return found

    def _fill(self, buffer: memoryview, start: int) -> None:
        done = 0
        while done < len(buffer):
            count = os.preadv(self._handle, [buffer[done:]], start + done)
            if not count:
                raise DocumentError(f"{self.path.name} ends too early; export the document again")
            done += count

    def _header(self) -> tuple[dict[str, str], dict[str, _Entry]]:
        size = os.fstat(self._handle).st_size
        try:
            length = int.from_bytes(os.pread(self._handle, 8, 0), "little")
            if not 2 <= length <= min(LARGEST_HEADER, size - 8):
                raise ValueError(f"its header would have {length} bytes of {size}")
            read: dict[str, Any] = json.loads(os.pread(self._handle, length, 8))
            metadata = read.pop("__metadata__", {})
            entries = {name: _entry(each, 8 + length, size) for name, each in read.items()}
        except (KeyError, TypeError, ValueError, AttributeError, OSError, RecursionError) as error:
            raise DocumentError(
                f"{self.path.name} is not a whole safetensors file: {error}"
            ) from None
        return metadata, entries


def _entry(read: Any, data: int, size: int) -> _Entry:
    # A tensor without axes, which no document has, counts as one with a single row.
    dtype, shape = DTYPES[read["dtype"]], tuple(map(int, read["shape"])) or (1,)
    start, end = map(int, read["data_offsets"])
    if min((start, *shape)) < 0 or end - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"a tensor of shape {list(shape)} has {end - start} bytes")
    if data + end > size:
        raise ValueError(f"{data + end} bytes are needed, the file has {size}")
    return _Entry(dtype, shape, data + start)
