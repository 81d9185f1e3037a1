"""docs/api.md lists what is public: the `__all__` of these modules, and nothing else."""

import importlib
import inspect
import re

import pytest

from tests.pages import text_of

PAGE = text_of("docs/api.md")
MODULES = [
    "kvpolicy",
    "kvpolicy.policies",
    "kvpolicy.integrations.transformers",
    "kvpolicy.integrations.lm_eval",
    "kvpolicy.integrations.vllm",
    "kvpolicy.testing",
    "kvpolicy.attention",
    "kvpolicy.selection",
    "kvpolicy.host_counts",
    "kvpolicy.errors",
]


def listed() -> dict[str, list[str]]:
    """The names of each module in the page's table; a module may have several rows."""
    found: dict[str, list[str]] = {}
    for module, names in re.findall(
        r"^\| `(kvpolicy[\w.]*)`[^|]*\| ([^|]*) \|", PAGE, re.MULTILINE
    ):
        found.setdefault(module, []).extend(re.findall(r"`(\w+)`", names))
    return found


def test_the_page_names_these_modules() -> None:
    assert sorted(listed()) == sorted(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_what_the_page_lists_is_what_is_public(name: str) -> None:
    module, names = importlib.import_module(name), listed()[name]
    assert len(names) == len(set(names))
    assert sorted(names) == sorted(module.__all__), sorted(set(names) ^ set(module.__all__))
    for each in names:
        found = getattr(module, each)
        assert not inspect.ismodule(found)
        assert found.__doc__, f"{each} has no docstring"
