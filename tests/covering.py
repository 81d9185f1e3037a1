"""Which cases run: few, with every value of every axis of a file, or every pair of values."""

from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import pytest

# Every case of these runs always: each takes a fraction of a second, or is a page's own example.
WHOLE = {"core", "policies", "test_doctests.py", "test_examples.py", "test_readme.py"}
# Files and folders whose single tests take tens of seconds; their rooms have others.
SLOW = {
    "fuzz",
    "test_static.py",
    "test_leftovers.py",
    "test_two_devices.py",
    "test_device_map.py",
    "test_processes.py",
}
# Of these every eighth case runs: all would take minutes.
LONG = SLOW | {
    *("decoding", "situations", "suite", "test_shapes.py", "test_not_used.py"),
    *("test_together.py", "test_latent_reference.py", "test_chunked_prefill.py", "generate_twice"),
    *("test_tensor_parallel.py", "test_first_hour.py", "test_site.py", "test_gpu_script.py"),
    *("test_commands_in_pages.py", "test_reproduce.py", "test_kinds_page.py", "test_builds.py"),
}
EVERY = 8

Case = Mapping[str, Hashable]


def covering(tests: Sequence[Sequence[Case]]) -> list[list[int]]:
    """Returns of each test the indices of few cases, and at least one.

    Together they take every value of every axis. Greedily: each test in turn has the case that
    brings the most values no chosen one has, the earliest of equals.
    """
    values = [
        [{(axis, type(value), value) for axis, value in case.items()} for case in cases]
        for cases in tests
    ]
    missing = set[tuple[str, type, Hashable]]().union(*chain(*values))
    chosen = [[] for _ in tests]
    while missing or not all(chosen):
        for own, found in zip(values, chosen, strict=True):
            best = max(range(len(own)), key=lambda at: len(own[at] & missing))
            if own[best] & missing or not found:
                found.append(best)
                missing -= own[best]
    return [sorted(found) for found in chosen]


def case_of(item: pytest.Item) -> Case:
    """Returns an item's parameters; what cannot be hashed is told apart by its identity."""
    spec = getattr(item, "callspec", None)
    return {} if spec is None else {axis: _hashable(value) for axis, value in spec.params.items()}


def chosen_items(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Returns of every file the covering cases, all of `WHOLE` and few of `LONG`, in order."""
    files: dict[Path, dict[str, list[pytest.Item]]] = {}
    for item in items:
        tests = files.setdefault(item.path, {})
        tests.setdefault(getattr(item, "originalname", item.name), []).append(item)
    kept = set[pytest.Item]()
    for path, tests in files.items():
        if LONG & set(path.parts):
            kept.update([*chain(*tests.values())][::EVERY])
            continue
        chosen = covering([[*map(case_of, cases)] for cases in tests.values()])
        for cases, found in zip(tests.values(), chosen, strict=True):
            kept.update(cases if WHOLE & set(path.parts) else [cases[at] for at in found])
    return [item for item in items if item in kept]


def _hashable(value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def covering_pairs(
    axes: Mapping[str, Sequence[Hashable]], forbidden: Callable[[Case], bool]
) -> list[dict[str, Hashable]]:
    """Returns rows, a value of each axis, among which are all pairs of values that go together.

    Greedily: each row begins with the first pair that no row has, and takes on every other axis the
    value that brings the most pairs, the first of equals.
    """
    names = list(axes)
    missing = {
        ((one, a), (other, b)): None
        for one, other in combinations(names, 2)
        for a in axes[one]
        for b in axes[other]
    }
    rows = []
    for pair in list(missing):
        if pair in missing:
            row = _row_with(dict(pair), axes, missing, forbidden)
            if row is not None:
                rows.append(row)
                for own in combinations(row.items(), 2):
                    missing.pop(own, None)
    return rows


def _row_with(
    part: dict[str, Hashable],
    axes: Mapping[str, Sequence[Hashable]],
    missing: Container[object],
    forbidden: Callable[[Case], bool],
) -> dict[str, Hashable] | None:
    """Returns a whole row that begins with `part`; None if there is none."""
    if forbidden(part):
        return None
    name = next((name for name in axes if name not in part), None)
    if name is None:
        return {name: part[name] for name in axes}

    own = list(axes).index(name)
    others = [((axis, value), list(axes).index(axis) < own) for axis, value in part.items()]

    def gain(value: Hashable) -> int:
        new = name, value
        return sum(
            ((other, new) if before else (new, other)) in missing for other, before in others
        )

    for value in sorted(axes[name], key=gain, reverse=True):
        row = _row_with({**part, name: value}, axes, missing, forbidden)
        if row is not None:
            return row
    return None
