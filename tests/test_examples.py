"""The scripts of docs/examples and the pages that they stand beside run as they are."""

import re
import runpy

import pytest

from kvpolicy.testing import check_propagation, check_selector
from tests.pages import PYTHON, ROOT, printed, text_of

EXAMPLES = ROOT / "docs" / "examples"
# What each prints on its last line.
PRINTED = {
    "many_questions": r"3 of 3 answers right, from 20% of the document's cache",
    "chat": r"turn 3: .* the flower, (\d+) of 7\d\d tokens held",
    "composition": r"77% of the prefill, 101 tokens kept: rabbit\.",
    "own_scorer": r"20% of the cache kept: rabbit\.",
    "comparison": r"StreamingLLM +0% right, +20% of the tokens held",
    "langchain_pipeline": r"[34] of 4 answers right, from 2\d% of the cache",
    "shorter_prompt": r"150 of 500 tokens are left; the answer is: rabbit\.",
    "transformers_serve": r"[34] of 4 answers right, from 3\d% of the cache",
}
# What an example needs that the tests are not installed with.
NEEDS = {
    "langchain_pipeline": ["langchain_huggingface"],
    "transformers_serve": ["fastapi", "openai", "uvicorn"],
}


def test_every_example_is_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(PRINTED)
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) < 40


@pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")
@pytest.mark.parametrize("name", PRINTED)
def test_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    for package in NEEDS.get(name, []):
        pytest.importorskip(package)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    print("\n".join(lines))
    assert re.fullmatch(PRINTED[name], lines[-1])


@pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")
def test_the_page_of_own_parts() -> None:
    """Its blocks follow on each other; the contracts that they call find nothing."""
    page = text_of("docs/own_parts.md")
    blocks = PYTHON.findall(page)
    assert len(blocks) == 4
    names: dict[str, object] = {}
    found = "".join(printed(block, names) for block in blocks)
    said = re.search(r"This prints `(.*?)`", page)
    assert said is not None
    assert found.strip() == said[1]
    assert names["check_selector"] is check_selector
    assert names["check_propagation"] is check_propagation
