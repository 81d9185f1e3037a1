"""The README's examples run, and print what it says."""

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.reference import random_tokens, tiny_model
from tests.support_table import support_table

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
FIRST, USE, SCORER = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


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


def test_the_example_of_use() -> None:
    def inputs(length: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([random_tokens(0, length)])}

    printed = run(
        USE.replace("256", "4").replace("**longer_inputs", "torch.cat([output, input_ids], dim=1)"),
        torch=torch,
        model=tiny_model("llama", seed=0),
        inputs=inputs(30),
        input_ids=torch.tensor([random_tokens(1, 3)]),
    )
    assert printed.splitlines()[-1].startswith("total")


@pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")
def test_the_example_of_a_scorer() -> None:
    run(SCORER)
    assert len(SCORER.strip().splitlines()) <= 17


def test_the_padding_of_ada_kv_is_that_of_the_results() -> None:
    rows = json.loads((ROOT / "benchmarks/results/needle/compare.json").read_text())["rows"]
    page = (ROOT / "docs/methods/ada_kv.md").read_text()
    found = [row for row in rows if row["policy"] == "ada_kv"]
    assert len(found) == 3
    for row in found:
        held = row["kv_bytes"]
        padding, share = held["padding"] / held["held"], held["share"]
        assert f"| {row['retention_rate']:g} | {padding:.1%} | {share:.1%} |" in page


def test_the_table_of_families_is_that_of_the_tests() -> None:
    assert support_table() in README
