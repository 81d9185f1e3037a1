"""Read essays from a folder, and split them into sentences."""

from __future__ import annotations

import re
from pathlib import Path

from kvpolicy.evaluation.text_files import read_text

# After a full stop and its quotes, if white space and then no small letter follow.
_END = re.compile("(?:(?<=[.!?])|(?<=[.!?][\"'\u2019\u201d)\\]]))\\s+(?=[^a-z\\s])")


def read_essays(data: Path) -> str:
    """Read the essays in ``data/essays/*.txt``, joined in the order of their file names.

    Args:
        data: The folder of local data.

    Raises:
        ValueError: There are none.
    """
    files = sorted((data / "essays").glob("*.txt"))
    if not files:
        raise ValueError(
            f"data must hold essays as essays/*.txt, got none in {data}; put texts there, or leave "
            "data out to let the harness fetch them"
        )
    return " ".join(read_text(file, "essay").strip() for file in files)


def sentences_of(text: str) -> list[str]:
    """Split a text into sentences, without nltk's downloaded data.

    Example:
        >>> sentences_of('It was late. "Who is it?" he asked, e.g. in vain. No one came!')
        ['It was late.', '"Who is it?" he asked, e.g. in vain.', 'No one came!']
    """
    return [each for each in _END.split(text.strip()) if each]


def has_punkt() -> bool:
    """True if nltk finds the downloaded data of its sentence splitter."""
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        return False
    return True
