from collections.abc import Iterator

import pytest

from tests.integrations.flash.stand_in import installed


@pytest.fixture(autouse=True)
def stand_in() -> Iterator[None]:
    """Every test of this folder finds the stand-in in place of flash attention's packages."""
    with installed():
        yield
