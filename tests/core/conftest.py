from collections.abc import Iterator

import pytest
from hypothesis import Phase, settings


@pytest.fixture
def first_find() -> Iterator[None]:
    """Contracts show the first layer that breaks them: to make it smaller takes seconds a test."""
    usual = settings.default
    assert usual is not None
    settings.register_profile("first find", usual, phases=[Phase.explicit, Phase.generate])
    settings.load_profile("first find")
    yield
    settings.register_profile("usual", usual)
    settings.load_profile("usual")
