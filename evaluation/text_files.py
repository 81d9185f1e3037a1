"""Read text files, with clear errors."""

from __future__ import annotations

import sys
from pathlib import Path


def read_prompt(path: Path) -> str:
    """Read one prompt's text from a file, or from standard input if the path is ``-``.

    Line ends at its end are cut off.

    Raises:
        ValueError: See `read_text`.
    """
    if str(path) == "-":
        text = _decoded(sys.stdin.buffer.read(), "prompt on standard input")
    else:
        text = read_text(path, "prompt file")
    return text.rstrip("\r\n")


def read_text(path: Path, what: str) -> str:
    """Read a UTF-8 text file; raise ValueError if it is empty.

    Args:
        path: The file.
        what: What it is, for messages.

    Raises:
        ValueError: It does not exist, is a folder, is empty or is not text.
    """
    if not path.exists():
        raise ValueError(f"{what} {path} does not exist")
    if not path.is_file():
        raise ValueError(f"{what} {path} must be a file, got a folder or device")
    return _decoded(path.read_bytes(), f"{what} {path}")


def _decoded(content: bytes, what: str) -> str:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{what} must be UTF-8 text, got other bytes") from None
    if "\0" in text:
        raise ValueError(f"{what} must be UTF-8 text, got a binary file with NUL bytes")
    if not text.strip():
        raise ValueError(f"{what} is empty")
    return text
