"""Says why a policy is refused, with the policy's name on the command line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from kvpolicy.policy import CachePolicy


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Put a policy's name before the message of a ValueError that a ``with`` block raises."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def in_users_words(reason: str, policy: CachePolicy | None, name: str) -> str:
    """Return the reason for a refusal with a policy's name in place of its classes.

    Errors write policies and their parts as Python does. A command line has named them otherwise.
    The policy is None if it could not be built.

    Example:
        >>> from kvpolicy.policies import SnapKV
        >>> in_users_words("layers [1, 2] of SnapKV(retention_rate=0.1)", SnapKV(), "snapkv 0.1")
        'layers 1, 2 of snapkv 0.1'
    """
    said = re.sub(r"\[(\d+(?:, \d+)*)\]", r"\1", _without_arguments(reason))
    if policy is not None:
        for part in (policy, policy.scorer, policy.selector, policy.propagation):
            said = re.sub(rf"\b{type(part).__name__}\b", lambda _: name, said)
    return " ".join(said.split())


def _without_arguments(text: str) -> str:
    """Remove the parenthesised arguments after a class name."""
    written, depth = "", 0
    for character in text:
        if character == "(" and (depth or re.search(r"\b[A-Z]\w*$", written)):
            depth += 1
        if not depth:
            written += character
        if character == ")" and depth:
            depth -= 1
    return written
