"""Which cases of a test run where not all do: few, with every value of every parameter."""

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

# Every case of these runs always: each takes a fraction of a second, or is a page's own example.
WHOLE = {
    "core",
    "policies",
    "test_commands_in_pages.py",
    "test_doctests.py",
    "test_examples.py",
    "test_kinds_page.py",
    "test_readme.py",
    "test_reproduce.py",
}

Case = Mapping[str, Hashable]


def covering(cases: Sequence[Case]) -> list[int]:
    """Returns the indices of few cases that together take every value of every axis.

    Greedily: always the case that brings the most values no chosen one has, the earliest of equals.

    Args:
        cases: the value of each axis, one mapping a case. Equal values of unlike types are two
            values.

    Returns:
        Indices into `cases`, ascending; all of them where every case has a value of its own.
    """
    values = [{(axis, type(value), value) for axis, value in case.items()} for case in cases]
    missing = set[tuple[str, type, Hashable]]().union(*values)
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda at: len(values[at] & missing))
        chosen.append(best)
        missing -= values[best]
    return sorted(chosen) if chosen else list(range(len(cases)))[:1]


def case_of(item: pytest.Item) -> Case:
    """Returns an item's parameters; what cannot be hashed is told apart by its identity."""
    spec = getattr(item, "callspec", None)
    return {} if spec is None else {axis: _hashable(value) for axis, value in spec.params.items()}


def chosen_items(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Returns of every test the covering cases, and all of what `WHOLE` names, in their order."""
    tests: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        tests.setdefault((item.path, getattr(item, "originalname", item.name)), []).append(item)
    kept = set[pytest.Item]()
    for (path, _), cases in tests.items():
        whole = WHOLE & set(path.parts)
        kept.update(cases if whole else [cases[at] for at in covering([*map(case_of, cases)])])
    return [item for item in items if item in kept]


def _hashable(value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value
