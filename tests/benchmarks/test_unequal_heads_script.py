"""The benchmark of unequal heads: its rows by hand, and that both caches hold the same."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import unequal_heads
from benchmarks.common import TINY, random_prompt
from kvpolicy.integrations.transformers.state.packed import Packed


def test_rows_fit_the_table() -> None:
    ratio = {"median": 1.0345, "lowest": 0.9, "highest": 1.2}
    row = {"model": "random", "context": 8192, "rate": 0.02, "kept": 0.02, "held": 0.021}
    bare = {**row, "padded": 1.0}
    assert unequal_heads.TABLE.line(bare).split() == [
        *("random", "8192", "0.02", "2.0%", "2.1%", "100.0%"),
    ]
    timed = {**bare, "padded_ms": [10.0, 20.0], "packed_ms": [9.0], "of_padded": ratio}
    words = unequal_heads.TABLE.line(timed)
    assert len(words) <= 80
    assert words.split()[6:] == ["15.00", "9.00", "1.03", "(0.90-1.20)"]


def test_the_padded_copy_holds_the_same_in_more_bytes() -> None:
    model = TINY.build()
    cache = unequal_heads.read(model, random_prompt(model.config.vocab_size, 200), 0.3)
    other = unequal_heads.padded(cache)
    unlike = 0
    for one, twin in zip(cache.layers, other.layers, strict=True):
        unlike += isinstance(one.held, Packed)
        assert not isinstance(twin.held, Packed)
        assert torch.equal(one.positions, twin.positions)
        assert torch.equal(one.keys, twin.keys)
        assert torch.equal(one.values, twin.values)
    assert unlike
    found = unequal_heads.shares(cache)
    assert found["kept"] == 0.3
    assert found["kept"] <= found["held"] < found["padded"]


def test_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unequal_heads.main(["--quick", "--threads=1", f"--out={tmp_path}"])
    record = json.loads((tmp_path / "unequal_heads.json").read_text())
    rates = list(unequal_heads.RATES)
    assert [row["rate"] for row in record["rows"]] == rates * 2
    assert all(row["held"] <= row["padded"] for row in record["rows"])
    assert all(row["held"] <= row["kept"] * 16 / 15 for row in record["rows"])
    capsys.readouterr()
    unequal_heads.main(["--show", str(tmp_path / "unequal_heads.json"), "--threads=1"])
    assert capsys.readouterr().out.count("\n") == 1 + len(record["rows"])
