"""The benchmark of prompts in chunks: which prompts it reads, and a quick run."""

import json
from pathlib import Path

import pytest

from benchmarks import chunks


def test_every_method_is_read_in_both_ways_and_few_of_them_longer() -> None:
    options = chunks.options_of(["--contexts", "100", "--long", "300", "--chunks", "7"])
    cells = chunks.cells_of(options)
    assert cells[:2] == [(100, "dynamic_cache", None), (100, "dynamic_cache", 7)]
    assert [cell for cell in cells if cell[0] == 300] == [
        (300, name, 7) for name in chunks.LONG_METHODS
    ]
    assert len(cells) == 2 * len(chunks.METHODS) + len(chunks.LONG_METHODS)


def test_a_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chunks.main(["--quick", "--methods", "fastkv", "--long", "300", "--out", str(tmp_path)])
    shown = capsys.readouterr().out
    record = json.loads((tmp_path / "chunks.json").read_text())
    assert [(row["context"], row["chunk"]) for row in record["prompts"]] == [
        (256, None),
        (256, 64),
        (300, 64),
    ]
    assert all(row["peak"]["cpu_ms"] > 0 for row in record["prompts"])
    chunks.main(["--show", str(tmp_path / "chunks.json")])
    assert capsys.readouterr().out == shown
