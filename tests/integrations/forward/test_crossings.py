"""A forward can be followed: how often its calls go from file to file at every layer."""

import pytest

from tests.tools.crossings import SITUATIONS, per_layer, situation


@pytest.mark.parametrize("name", SITUATIONS)
def test_a_layer_costs_few_crossings(name: str) -> None:
    assert situation(name, 8)[0].total() > 8  # something is counted
    assert per_layer(name) <= SITUATIONS[name]
