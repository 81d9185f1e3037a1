"""Read text files, with clear errors."""

from __future__ import annotations

import sys
from pathlib import Path


def read_prompt(path: Path) -> str:
    """Read a prompt from a file, or standard input for ``-``, without the line ends at its end."""
    if str(path) == "-":
        text = _decoded(sys.stdin.buffer.read(), "prompt on standard input")
    else:
        text = read_text(path, "prompt file")
    return text.rstrip("\r\n")


def read_text(path: Path, what: str) -> str:
    """Read a UTF-8 text file; ValueError if it is missing, a folder, empty or not text."""
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
