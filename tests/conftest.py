import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

settings.register_profile("quick", max_examples=40, deadline=None)
settings.register_profile("thorough", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

# The models are tiny: a second thread costs more than it brings, above all beside other processes.
torch.set_num_threads(1)


# Files and folders whose single tests take tens of seconds; their rooms have others.
SLOW = {
    "fuzz",
    "test_static.py",
    "test_leftovers.py",
    "test_two_devices.py",
    "test_device_map.py",
    "test_processes.py",
}
QUICK_TESTS_A_FILE = 2


@pytest.fixture(autouse=True)
def nothing_stays_behind() -> Iterator[None]:
    """No test leaves a self-check under way, in which every model would be taken as checked."""
    yield
    check = sys.modules.get("kvpolicy.integrations.transformers.model.check")
    assert check is None or check._checking.get() is None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="the first tests of every file")
    parser.addoption(
        "--cases", type=int, metavar="N", help="of tests with more cases, N spread over all"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = items
    if config.getoption("--quick"):
        chosen = quick(items)
    elif config.getoption("--cases"):
        chosen = spread(items, config.getoption("--cases"))
    if chosen is not items:
        kept = set(chosen)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = chosen


def quick(items: list[pytest.Item]) -> list[pytest.Item]:
    """The first case of the first tests of every file but the slow ones.

    A new file is in it by itself.
    """
    taken: dict[Path, list[str]] = {}
    chosen = []
    for item in items:
        name = getattr(item, "originalname", item.name)
        seen = taken.setdefault(item.path, [])
        slow = SLOW & set(item.path.parts)
        if not slow and name not in seen and len(seen) < QUICK_TESTS_A_FILE:
            seen.append(name)
            chosen.append(item)
    return chosen


def spread(items: list[pytest.Item], most: int) -> list[pytest.Item]:
    """Of every test at most so many cases, the first and the last among them.

    Families, policies and rows multiply to hundreds of cases; any few of them cover each.
    """
    cases: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        name = getattr(item, "originalname", item.name)
        cases.setdefault((item.path, name), []).append(item)
    kept: set[pytest.Item] = set()
    for each in cases.values():
        count = min(most, len(each))
        kept |= {each[round(at * (len(each) - 1) / max(count - 1, 1))] for at in range(count)}
    return [item for item in items if item in kept]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
