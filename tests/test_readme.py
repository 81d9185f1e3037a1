"""The examples of the README run; the tables of results are as measured."""

import contextlib
import io
import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks.common import BASELINE
from kvpolicy.evaluation.comparison.speed import Speed
from kvpolicy.integrations.transformers.model.tested import TESTED
from kvpolicy.registry import registered
from tests.integrations.lm_eval.support import char_tokenizer
from tests.integrations.model.builds.catalogue import builds
from tests.reference import tiny_model
from tests.support_table import PAGE, outcomes, page, support_table

ROOT = Path(__file__).parents[1]
BUILDS = builds()
README = (ROOT / "README.md").read_text()
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
FIRST, DOCUMENT, SCORER = PYTHON.findall(README)


def run(code: str, **names: Any) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    return printed.getvalue()


def test_the_first_example_prints_what_it_says() -> None:
    said = re.search(r"This prints `(.*?)`", README)
    assert said is not None
    assert run(FIRST).strip() == said[1]
    assert len(FIRST.strip().splitlines()) <= 12


def test_the_example_of_a_document() -> None:
    tokenizer, text = char_tokenizer(), "it was written by the rain, and costs a little. " * 2
    printed = run(
        DOCUMENT.replace("64", "4"),
        model=tiny_model("llama", seed=0),
        tokenizer=tokenizer,
        text=text,
    )
    assert len(printed) > 2
    assert len(DOCUMENT.strip().splitlines()) == 6


@pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")
def test_the_example_of_a_scorer() -> None:
    run(SCORER)
    assert len(SCORER.strip().splitlines()) <= 17


def test_the_figures_of_unequal_heads_are_those_of_the_results() -> None:
    rows = json.loads((ROOT / "benchmarks/results/unequal_heads.json").read_text())["rows"]
    page = (ROOT / "docs/methods/adakv.md").read_text()
    times = (ROOT / "docs/benchmarks.md").read_text()
    assert len(rows) == 6
    for row in rows:
        assert f"| {row['rate']:g} | {row['held']:.1%} | {row['padded']:.1%} |" in page
        if "of_padded" not in row:
            continue
        padded, packed = (median(row[f"{name}_ms"]) for name in ("padded", "packed"))
        middle, lowest, highest = row["of_padded"].values()
        extent = f"{middle:.2f} ({lowest:.2f} to {highest:.2f})"
        assert f"| {row['rate']:g} | {padded:.2f} | {packed:.2f} | {extent} |" in times


def test_the_tables_of_families_are_what_was_found() -> None:
    assert support_table() in README
    assert PAGE.read_text(encoding="utf-8") == page()


def test_what_needs_no_self_check_was_found_right() -> None:
    """Every build of such a type; PaliGemma is held by the tests with images."""
    found: dict[str, set[str]] = {}
    for each in outcomes():
        model_type = BUILDS[each["name"]].model_type
        found.setdefault(model_type, set()).add(each["outcome"])
    right = {name for name, outcome in found.items() if outcome == {"right"}}
    assert TESTED - {"paligemma"} <= right


def cells_of(page: str, columns: int) -> dict[str, list[str]]:
    """The rows of the tables of so many columns that begin with a method, by the method."""
    classes = {factory.__name__ for factory in registered("policy").values()}
    rows = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        name = cells[0].partition(",")[0].strip("`") if cells else ""
        if len(cells) == columns and name in classes:
            rows[name] = cells[1:]
    return rows


def speed_of(rows: list[dict[str, Any]], name: str, context: int, phase: str) -> str:
    """As the tables have it: a median, marked where its rounds disagree or are few."""
    at = {row["policy"]: row for row in rows if row["context"] == context}
    times = zip(at[name][f"{phase}_ms"], at[BASELINE][f"{phase}_ms"], strict=True)
    return Speed(tuple(theirs / ours for ours, theirs in times)).text.removeprefix("x")


def test_the_tables_of_results_are_those_of_the_files() -> None:
    results = ROOT / "benchmarks/results"
    speeds = json.loads((results / "methods.json").read_text())["rows"]
    answers = json.loads((results / "needle/compare.json").read_text())["rows"]
    measured = README[README.index("## Measured") :]
    short, long = cells_of(measured, 5), cells_of((ROOT / "docs/results.md").read_text(), 8)
    for name in dict.fromkeys(row["policy"] for row in speeds if row["policy"] != BASELINE):
        factory = registered("policy")[name]
        cells = long[factory.__name__]
        found = [
            speed_of(speeds, name, context, phase)
            for phase in ("prefill", "decode")
            for context in (2048, 8192, 32768)
        ]
        assert [cell.partition(" ")[0] for cell in cells[:6]] == found
        assert short[factory.__name__][2:] == [found[1], found[4]]
        for rate, cell in zip((0.02, 0.1), short[factory.__name__], strict=False):
            (row,) = (
                row
                for row in answers
                if row["policy"] == name and row["retention_rate"] in (None, rate)
            )
            percents = [f"{100 * each['rate']:.0f}" for each in row["exact_match"].values()]
            # Without a rate there is nothing to say a second time.
            assert cell in (" / ".join(percents), "" if row["retention_rate"] is None else None)


def test_what_pages_link_exists() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    for file in pages:
        for link in re.findall(r"\]\(([^)#:]+)\)", file.read_text()):
            assert (file.parent / link).exists(), f"{file.name} links {link}"
