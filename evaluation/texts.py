"""Read text of files, and what every Python has: its documentation and its own sources.

These need no download. Both differ between versions of Python, so results that use them hold for
one version, which `kvpolicy.evaluation.results.environment` records.
"""

import re
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from random import Random

_WORD = re.compile(r"\S+\s*")


def words_of(text: str) -> list[str]:
    r"""Split a text into words, each with the white space after it.

    Joined they are the text, without white space at its beginning.

    Example:
        >>> words_of("One line.\n\nAnother")
        ['One ', 'line.\n\n', 'Another']
    """
    return _WORD.findall(text)


def documentation(rng: Random) -> Iterator[str]:
    """Yield the words of Python's documentation of its language, without an end.

    The 79 topics (465,000 characters in Python 3.11) are in an order drawn at random, then the same
    again. It is a ValueError if this Python has none.
    """
    topics = list(_topics())
    rng.shuffle(topics)
    while True:
        yield from chain.from_iterable(topics)


@cache
def _topics() -> tuple[tuple[str, ...], ...]:
    """Return the words of each topic, in order of the topics' names."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ValueError(
            "documentation must come with Python as pydoc_data.topics, and this Python has none; "
            "install all of the standard library, or give a text file"
        ) from None
    return tuple(tuple(words_of(f"{topics[name].strip()}\n\n")) for name in sorted(topics))


@cache
def sources() -> tuple[Path, ...]:
    """Return the files of the standard library that are modules by themselves, in order of name.

    Modules of packages, private ones and those of other systems are not among them. It is a
    ValueError if this Python has none, as where it is frozen into a program.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    names = sorted(name for name in sys.stdlib_module_names if not name.startswith("_"))
    found = tuple(path for name in names if (path := folder / f"{name}.py").is_file())
    if not found:
        raise ValueError(
            f"sources of the standard library must be in {folder}, got none; use a Python that is "
            "installed with its sources"
        )
    return found


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
