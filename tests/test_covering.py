"""What `make test` runs where it does not run every case."""

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Hashable
from itertools import chain, combinations, product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.covering import (
    EVERY,
    LONG,
    WHOLE,
    Case,
    case_of,
    chosen_items,
    covering,
    covering_pairs,
)

VALUES = st.one_of(st.integers(0, 3), st.booleans(), st.sampled_from("abc"), st.none())


@st.composite
def cases(draw: st.DrawFn) -> list[dict[str, Hashable]]:
    axes = draw(st.lists(st.sampled_from("uvwxyz"), unique=True, max_size=4))
    return draw(
        st.lists(st.fixed_dictionaries(dict.fromkeys(axes, VALUES)), min_size=1, max_size=40)
    )


def values_of(some: list[dict[str, Hashable]]) -> set[tuple[str, str]]:
    return {(axis, repr(value)) for case in some for axis, value in case.items()}


@given(st.lists(cases(), max_size=4))
def test_every_value_of_every_axis_is_chosen(tests: list[list[dict[str, Hashable]]]) -> None:
    chosen = covering(tests)
    assert all(found and found == sorted(set(found)) for found in chosen)
    taken = [cases[at] for cases, found in zip(tests, chosen, strict=True) for at in found]
    values = values_of([*chain(*tests)])
    assert values_of(taken) == values
    assert len(taken) <= len(values) + len(tests)


def test_a_product_needs_as_many_cases_as_its_longest_axis() -> None:
    grid = [{"x": x, "y": y, "z": z} for x, y, z in product("abc", "de", range(3))]
    chosen = [tuple(grid[at].values()) for at in covering([grid])[0]]
    assert chosen == [("a", "d", 0), ("b", "e", 1), ("c", "d", 2)]


def test_tests_of_one_file_share_values() -> None:
    numbers = [{"x": x} for x in range(5)]
    assert covering([numbers, numbers, [{}, {}]]) == [[0, 2, 4], [1, 3], [0]]


def test_every_pair_that_can_be_is_in_a_row() -> None:
    axes = {"w": [0, 1, 2], "x": "abcd", "y": [True, False], "z": "pq"}

    def forbidden(row: Case) -> bool:
        return row.get("w") == 2 and row.get("y", True) and row.get("x") in ("a", None)

    def pairs(row: dict[str, object]) -> set[tuple[tuple[str, object], ...]]:
        return set(combinations(row.items(), 2))

    every = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    possible = set().union(*(pairs(row) for row in every if not forbidden(row)))
    rows = covering_pairs(axes, lambda row: len(row) == 4 and forbidden(row))
    assert not any(map(forbidden, rows))
    assert set().union(*map(pairs, rows)) == possible
    assert len(rows) <= 16
    assert rows == covering_pairs(axes, lambda row: len(row) == 4 and forbidden(row))


def test_equal_values_of_unlike_types_are_two() -> None:
    assert covering([[{"x": 1}, {"x": True}, {"x": 1.0}, {"x": 1}]]) == [[0, 1, 2]]


def test_of_this_suite_every_value_is_chosen(request: pytest.FixtureRequest) -> None:
    items = [item for item in request.session.items if not LONG & set(item.path.parts)]
    chosen = chosen_items(items)

    def taken(some: list[pytest.Item]) -> set[tuple[object, ...]]:
        return {
            (item.path, axis, type(value), value)
            for item in some
            for axis, value in case_of(item).items()
        } | {(item.path, getattr(item, "originalname", item.name)) for item in some}

    assert taken(chosen) == taken(items)
    whole = [item for item in items if WHOLE & set(item.path.parts)]
    assert set(whole) <= set(chosen)


def test_of_long_files_some_cases_are_chosen(request: pytest.FixtureRequest) -> None:
    items = [item for item in request.session.items if LONG & set(item.path.parts)]
    every, chosen = (Counter(each.path for each in of) for of in (items, chosen_items(items)))
    assert chosen == {path: -(-count // EVERY) for path, count in every.items()}


def test_what_is_never_sampled_is_there(request: pytest.FixtureRequest) -> None:
    tests = request.config.rootpath / "tests"
    assert {path.name for path in tests.rglob("*")} >= WHOLE | LONG


GRID = """
import pytest

@pytest.mark.parametrize("x", range(3))
@pytest.mark.parametrize("y", range(4))
def test_grid(x, y):
    assert x + y >= 0
"""


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_run_says_what_it_left_out(
    request: pytest.FixtureRequest, tmp_path: Path, workers: str
) -> None:
    """With processes of pytest-xdist, which print nothing themselves, as without."""
    (tmp_path / "test_grid.py").write_text(GRID)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-n", workers, "-p", "tests.conftest"]
    run = subprocess.run(
        [*command, "--covering", str(tmp_path)],
        cwd=request.config.rootpath,
        env={key: value for key, value in os.environ.items() if "PYTEST_" not in key},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "4 passed" in run.stdout
    assert "8 cases left out" in run.stdout
    assert re.search(r"^ *8 of +12 ", run.stdout, re.MULTILINE)
