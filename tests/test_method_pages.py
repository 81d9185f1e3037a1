"""docs/methods: a page for each method, of one structure."""

import ast
import inspect
import re
from pathlib import Path

import pytest

from kvpolicy import policies
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.registry import registered

PAGES = Path(__file__).parents[1] / "docs" / "methods"
FILES = sorted(page for page in PAGES.glob("*.md") if page.name != "README.md")
BUDGETS = (PAGES / "README.md").read_text(encoding="utf-8").partition("## Budgets")[2]
SHARED = set(re.findall(r"^\| `(\w+)` \|", BUDGETS, re.MULTILINE))
SECTIONS = ["How it works", "Arguments", "When to use it"]
PAPER = ["Source", "Where it differs from the paper"]


def page_of(method: str) -> Path:
    """The page of a method: the one whose example builds it."""
    made = f"PolicyCache({registered('policy')[method].__name__}("
    return next(page for page in FILES if made in page.read_text("utf-8"))


@pytest.mark.parametrize("page", FILES, ids=lambda page: page.stem)
def test_a_page_has_its_sections(page: Path) -> None:
    found = re.findall(r"^## (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert found[: len(SECTIONS)] == SECTIONS
    own = {"full_context", "random", "replaykv", "spirekv"}  # of no paper
    assert page.stem in own or found[len(SECTIONS) :][:2] == PAPER


@pytest.mark.parametrize("method", registered("policy"))
def test_a_page_has_the_example_and_the_arguments(method: str) -> None:
    page = page_of(method)
    text = page.read_text(encoding="utf-8")
    example = re.search(r"^cache = (PolicyCache\(.*\))$", text, re.MULTILINE)
    assert example is not None
    names = {name: getattr(policies, name) for name in policies.__all__}
    assert isinstance(eval(example[1], {**names, "PolicyCache": PolicyCache}), PolicyCache)
    arguments = text.partition("## Arguments")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?`) \|", arguments, re.MULTILINE)
    taken = set(inspect.signature(registered("policy")[method]).parameters)
    said = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert said <= taken
    assert taken - said <= SHARED
    assert "(README.md#budgets)" in arguments


@pytest.mark.parametrize("page", FILES, ids=lambda page: page.stem)
def test_code_on_a_page_is_python(page: Path) -> None:
    for code in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        ast.parse(code)
