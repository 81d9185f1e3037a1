"""Finds known names that resemble a misspelt one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches


def said(name: str, known: Iterable[str], text: str | None = None) -> str:
    """Return an unknown name for an error message, with the known names that resemble it.

    Args:
        name: The name; ``-`` counts as ``_``, and case does not count.
        known: The names that there are.
        text: What is written for the name; None for the name itself.

    Example:
        >>> said("snapvk", ["fastkv", "snapkv"]), said("other", ["fastkv", "snapkv"])
        ('snapvk (did you mean snapkv?)', 'other')
    """
    spelt = {each.replace("-", "_"): each for each in known}
    asked = name.replace("-", "_").lower()
    near = get_close_matches(asked, spelt, n=1)
    if near:
        # Other names that are as near: "fastvk" is one typo away from both FastV and FastKV.
        ratio = SequenceMatcher(None, near[0], asked).ratio()
        near = get_close_matches(asked, spelt, cutoff=max(ratio - 0.1, 0.6))
    shown = name if text is None else text
    return f"{shown} (did you mean {' or '.join(spelt[each] for each in near)}?)" if near else shown
