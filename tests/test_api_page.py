"""docs/api.md names the modules whose `__all__` is public."""

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


def test_the_page_names_these_modules() -> None:
    cells = re.findall(r"^\| (`kvpolicy.*?`) \|", PAGE, re.MULTILINE)
    assert re.findall(r"`([\w.]+)`", " ".join(cells)) == MODULES


@pytest.mark.parametrize("name", MODULES)
def test_public_names_are_documented(name: str) -> None:
    module = importlib.import_module(name)
    assert len(module.__all__) == len(set(module.__all__))
    for each in module.__all__:
        found = getattr(module, each)
        assert not inspect.ismodule(found)
        assert found.__doc__, f"{each} has no docstring"
