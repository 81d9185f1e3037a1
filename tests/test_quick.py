"""What `make quick` runs."""

import pytest

from tests.conftest import quick
from tests.covering import SLOW


def test_it_has_tests_of_every_folder_and_of_every_file_that_is_not_slow(
    request: pytest.FixtureRequest,
) -> None:
    items = request.session.items
    files = {item.path for item in items}
    chosen = {item.path for item in quick(items)}
    assert chosen == {file for file in files if not SLOW & set(file.parts)}
    rooms = {file.parent for file in files if file.parent.name not in SLOW}
    assert rooms == {file.parent for file in chosen}


def test_what_counts_as_slow_is_there(request: pytest.FixtureRequest) -> None:
    tests = request.config.rootpath / "tests"
    assert {path.name for path in tests.rglob("*")} >= SLOW
