"""Adds the arguments and errors that all parts share to their docstrings."""

import inspect
import re
from typing import TypeVar

T = TypeVar("T")

# A class whose own wording must differ documents the argument itself.
SHARED = {
    "retention_rate": "Fraction of the context every layer keeps, in (0, 1].",
    "window_size": "Last tokens that are always kept, at least 0.",
    "retention_tokens": "Number of tokens every layer keeps, at least 1, in place of the rate.",
    "kernel_size": "Width of the max-pooling, odd.",
    "decoding": "Number of tokens every layer keeps while an answer is decoded, at least 1;\n"
    "        True for ``retention_tokens``; or a `DecodingEviction`. None lets it grow.",
    "group_first": "Whether attention is averaged over each KV group before it is pooled.",
    "protect": "First tokens of the context that are always kept, at least 0.",
    "prefill_block": "Tokens of a prompt that are read at a time, at least 1. After each block\n"
    "        all layers evict, so that memory is bounded in prefill too. None reads it whole.",
}
# For methods without a budget of their own.
BOUNDED_BY_OTHERS = (
    "A `DecodingEviction`, by which every layer stays bounded while an answer is\n"
    "        decoded; None lets it grow."
)

_SECTIONS = ("Args", "Raises", "Example", "Source")
_ENTRY = re.compile(r"^ {4}(\w+): (.*?)(?=^ {4}\w|\Z)", re.MULTILINE | re.DOTALL)


def documented(cls: type[T]) -> type[T]:
    """Class decorator that completes a docstring with arguments and errors common to all parts.

    The docstring describes under ``Args:`` only the arguments that are special to the class. Every
    other argument gets its line from `SHARED`; all are put in the order of the signature.
    ``Raises:`` lists the errors common to all parts, unless the class has this section itself.

    Raises:
        TypeError: An argument is not documented, or a documented name is no argument.

    Example:
        >>> from kvpolicy.policies import KeyDiff
        >>> print(inspect.getdoc(KeyDiff))
        Keeps the keys that resemble the others least; needs no query, prefill is complete.
        <BLANKLINE>
        Args:
            retention_rate: Fraction of the context every layer keeps, in (0, 1].
            prefill_block: Tokens of a prompt that are read at a time, at least 1. After each block
                all layers evict, so that memory is bounded in prefill too. None reads it whole.
            decoding: Number of tokens every layer keeps while an answer is decoded, at least 1;
                True for ``retention_tokens``; or a `DecodingEviction`. None lets it grow.
            window_size: Last tokens that are always kept, at least 0.
            retention_tokens: Number of tokens every layer keeps, at least 1, in place of the rate.
            protect: First tokens of the context that are always kept, at least 0.
        ...
    """
    if cls.__doc__ is None:  # Python runs without docstrings (-OO)
        return cls
    sections = _sections(inspect.cleandoc(cls.__doc__))
    names = list(inspect.signature(cls).parameters)
    if names:
        sections["Args"] = _arguments(cls, names, sections["Args"])
        sections["Raises"] = sections["Raises"] or _raises(names)
    cls.__doc__ = "\n\n".join(text for text in sections.values() if text)
    return cls


def _sections(doc: str) -> dict[str, str]:
    """Split a docstring into its sections by heading; text before the first is under ``""``."""
    parts = re.split(rf"\n+(?=(?:{'|'.join(_SECTIONS)}):)", doc)
    found = {part.partition(":")[0]: part for part in parts[1:]}
    return {"": parts[0], **{name: found.get(name, "") for name in _SECTIONS}}


def _arguments(cls: type, names: list[str], section: str) -> str:
    own = {name: text.rstrip() for name, text in _ENTRY.findall(section)}
    missing = [name for name in names if name not in own and name not in SHARED]
    if missing or not own.keys() <= set(names):
        raise TypeError(
            f"the docstring of {cls.__name__} must describe {', '.join(missing) or 'nothing else'} "
            f"under Args, since its arguments are {', '.join(names)}, got {', '.join(own)}"
        )
    others = {} if "retention_tokens" in names else {"decoding": BOUNDED_BY_OTHERS}
    described = SHARED | others | own
    return "\n".join(["Args:", *(f"    {name}: {described[name]}" for name in names)])


def _raises(names: list[str]) -> str:
    given = ", or both budgets are given" if {"retention_tokens", "tsp_tokens"} & {*names} else ""
    return (
        "Raises:\n    TypeError: An argument is not of its type.\n"
        f"    ValueError: An argument is out of its range{given}."
    )
