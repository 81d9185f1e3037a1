import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.covering import SLOW, chosen_items

# Chance is for `make thorough` and `make fuzz`: what these find becomes an example of its test.
FIXED: dict[str, Any] = {"deadline": None, "derandomize": True, "database": None}
settings.register_profile("quick", max_examples=10, **FIXED)
settings.register_profile("ci", max_examples=40, **FIXED)
settings.register_profile("thorough", max_examples=1000, deadline=None, derandomize=False)
usual = "ci" if os.environ.get("CI") else "quick"
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", usual))

# The models are tiny: a second thread costs more than it brings, above all beside other processes.
torch.set_num_threads(1)

# Kernels for GPUs run in Triton's interpreter, if this is set before anything imports it.
os.environ.setdefault("TRITON_INTERPRET", "1")

QUICK_TESTS_A_FILE = 2
LEFT_OUT = pytest.StashKey[dict[str, tuple[int, int]]]()


@pytest.fixture(autouse=True)
def nothing_stays_behind() -> Iterator[None]:
    """No test leaves a self-check under way, in which every model would be taken as checked."""
    yield
    check = sys.modules.get("kvpolicy.integrations.transformers.model.check")
    assert check is None or check._checking.get() is None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="the first tests of every file")
    parser.addoption(
        "--covering", action="store_true", help="few cases, with every parameter value of a file"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = items
    if config.getoption("--quick"):
        chosen = quick(items)
    elif config.getoption("--covering"):
        chosen = chosen_items(items)
    config.stash[LEFT_OUT] = left_out(items, chosen)
    if chosen is not items:
        kept = set(chosen)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = chosen


def left_out(items: list[pytest.Item], chosen: list[pytest.Item]) -> dict[str, tuple[int, int]]:
    """Cases that are left out and all cases, of each folder in which some are."""
    cases = Counter(folder(item) for item in items)
    kept = Counter(folder(item) for item in chosen)
    return {
        name: (cases[name] - kept[name], cases[name]) for name in cases if cases[name] != kept[name]
    }


def folder(item: pytest.Item) -> str:
    """The folder that an item lies in, three levels deep at most."""
    return "/".join(item.path.relative_to(item.config.rootpath).parts[:-1][:3]) or "."


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker tells the process that prints what has been left out."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["left_out"] = session.config.stash.get(LEFT_OUT, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", {})


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Says which cases have been left out, so that nobody takes a part for the whole."""
    counts = config.stash.get(LEFT_OUT, {})
    total = sum(count for count, _ in counts.values())
    if total:
        terminalreporter.section(f"{total:,} cases left out; with CI=true `make test` runs them")
        for name, (count, cases) in sorted(counts.items(), key=lambda each: -each[1][0]):
            terminalreporter.write_line(f"{count:6,} of {cases:6,}  {name}")


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


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
