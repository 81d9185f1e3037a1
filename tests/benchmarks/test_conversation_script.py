"""Turns on a long document: every policy takes all of them, and what is held is counted."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import conversation

QUICK = ["--quick", "--threads", "1", "--document", "200", "--turns", "3"]


def test_every_policy_takes_every_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conversation.main([*QUICK, "--out", str(tmp_path)])
    record: dict[str, Any] = json.loads((tmp_path / "conversation.json").read_text())
    assert [row["policy"] for row in record["rows"]] == list(conversation.POLICIES)
    slot = 4 * 2 * 2 * 8 * 4  # layers, keys and values, KV heads, head_dim, bytes of a float32
    for row in record["rows"]:
        assert len(row["turn_ms"]) == 3
        assert row["document_ms"] > 0 < min(row["turn_ms"])
        seen = [200, 220, 240, 260]
        kept = seen if row["policy"] == "full_context" else [int(0.1 * each) for each in seen]
        assert [held / slot for held in row["held_bytes"]] == kept
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert max(map(len, lines)) <= 80
    conversation.main(["--show", str(tmp_path / "conversation.json"), "--out", str(tmp_path)])
    assert capsys.readouterr().out.splitlines() == lines
