"""A real model's shape at a tiny size: whole and in chunks, with what is allowed beside it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import real_shape

QUICK = ["--quick", "--threads", "1", "--rounds", "2", "--contexts", "128", "--new-tokens", "3"]


def test_every_way_of_reading_is_measured_in_every_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    real_shape.main([*QUICK, "--chunk", "50", "--dtype", "float32", "--out", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    record: dict[str, Any] = json.loads((tmp_path / "real_shape.json").read_text())
    rows = {row["policy"]: row for row in record["rows"]}
    assert list(rows) == list(real_shape.plans(50))
    for name, row in rows.items():
        assert row["chunk"] == (50 if name.endswith("_chunks") else None)
        assert len(row["prefill_ms"]) == len(row["decode_ms"]) == len(row["growth_bytes"]) == 2
        whole = rows[name.removesuffix("_chunks")]
        assert row["held_bytes"] == whole["held_bytes"]
        assert row["prefill_allowed"] == whole["prefill_allowed"]
    assert rows["full_context"]["prefill_speedup"]["median"] == 1.0
    assert rows["fastkv"]["prefill_allowed"] > 1.2
    assert len(lines) == 2 * (len(rows) + 1) + 1
    assert max(map(len, lines)) <= 80
    real_shape.main(["--show", str(tmp_path / "real_shape.json")])
    assert capsys.readouterr().out.splitlines() == lines


def test_the_faster_type_is_one_of_two() -> None:
    assert real_shape.faster_type(64) in (torch.float32, torch.bfloat16)


def test_the_shape_is_the_published_one() -> None:
    with torch.device("meta"):
        model = real_shape.LLAMA_1B.build("meta", torch.bfloat16)
    # Llama-3.2-1B ties its embeddings: 1,235,814,400 and the output embeddings.
    assert sum(each.numel() for each in model.parameters()) == 1_235_814_400 + 128256 * 2048
