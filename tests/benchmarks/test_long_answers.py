"""Long answers: the benchmark's table."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.harness import RESULTS
from benchmarks.long_answers import measure
from kvpolicy.evaluation.tasks.long_answers import KINDS


def test_lines_by_hand() -> None:
    row = {"kind": "loop", "rule": "TOVA", "budget": 32, "every": 1, "steps": 4}
    row["right"] = [4, 2, 4, 2]
    words = measure.TABLE.line(row)
    assert len(words) <= 80
    # Shares of 1 and 1/2: a mean of 3/4, a deviation of sqrt(1/12), half of it times 1.96.
    assert words.split() == ["loop", "TOVA", "32", "1", "75.0%", "±", "28.3%", "50%"]
    none = measure.TABLE.line({**row, "budget": None, "every": None})
    assert none.split()[2:4] == ["-", "-"]


def test_tables_by_hand() -> None:
    row = {"kind": "loop", "rule": "TOVA", "budget": 32, "every": 1, "steps": 4, "right": [4, 2]}
    none = {**row, "rule": "none", "budget": None, "every": None}
    rows = [none, row, {**row, "budget": 64, "right": [4, 4]}, {**row, "kind": "chain"}]
    assert measure.table(rows, "loop", 16) == [
        "| loop, every 16 | 32 | 64 |",
        "|---|---|---|",
        "| `TOVA` | 75 (50) | 100 (100) |",
    ]


def test_the_tables_of_the_docs_are_what_was_measured() -> None:
    rows = json.loads((RESULTS / measure.FILE).read_text())["rows"]
    said = (RESULTS.parents[1] / "docs" / "decoding.md").read_text()
    assert {kind for kind, _ in measure.tables(rows)} == set(KINDS)
    for kind, every in measure.tables(rows):
        assert "\n".join(measure.table(rows, kind, every)) in said


def test_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    measure.main(["--quick", "--threads=1", f"--out={tmp_path}"])
    record = json.loads((tmp_path / measure.FILE).read_text())
    rules = ["none", *measure.RULES]
    assert [(row["kind"], row["rule"]) for row in record["rows"]] == [
        (kind, rule) for kind in KINDS for rule in rules
    ]
    assert all(len(row["right"]) == 2 for row in record["rows"])
    before = (tmp_path / measure.FILE).read_bytes()
    capsys.readouterr()
    measure.main(["--quick", "--threads=1", f"--out={tmp_path}"])  # nothing is left to measure
    assert capsys.readouterr().out.count("\n") == 1
    assert (tmp_path / measure.FILE).read_bytes() == before
    measure.main(["--show", str(tmp_path / measure.FILE), "--threads=1"])
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 1 + 2 * len(rules) + 2 * (2 + len(rules))  # none is in the first alone
    assert shown.count("| loop, every 16 | 24 |") == shown.count("| chain, every 16 | 24 |") == 1
    torch.set_num_threads(threads)
