"""The token ids of prompts with long answers.

Fillers and symbols are the needle language's, as are the tokens that every model has.
"""

from kvpolicy.evaluation.tasks.needle.vocabulary import (
    BOS,
    END,
    FILLERS,
    PAD,
    SYMBOLS,
    UNKNOWN,
)
from kvpolicy.evaluation.tasks.needle.vocabulary import token_names as needle_names

LET, FROM, ARROW, STOP = range(END + 1, UNKNOWN)
_NAMES = {LET: "LET", FROM: "FROM", ARROW: "->", STOP: ";"}

__all__ = ["ARROW", "BOS", "END", "FILLERS", "FROM", "LET", "PAD", "STOP", "SYMBOLS", "UNKNOWN"]


def token_names() -> list[str]:
    """Return the text of every token in the bundled model's vocabulary, in the order of ids.

    Example:
        >>> names = token_names()
        >>> names[LET], names[FROM], names[ARROW], names[STOP], names[SYMBOLS[0]], len(names)
        ('LET', 'FROM', '->', ';', 's0', 224)
    """
    return [_NAMES.get(token, name) for token, name in enumerate(needle_names())]
