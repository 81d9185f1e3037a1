"""The benchmark of prompts in chunks: which prompts it reads, and a quick run."""

import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from benchmarks import chunks, memory, pictures
from benchmarks.common import ModelSpec


def fake(spec: ModelSpec, policy: str, context: int, **how: Any) -> dict[str, Any] | None:
    """Chunks take a quarter more, but for one method that fails in them."""
    chunk = how["chunk"]
    if chunk and policy == "h2o":
        return None
    return {"growth_bytes": context << 20, "cpu_ms": 50.0 if chunk else 40.0}


def test_both_ways_take_turns_and_longer_prompts_come_in_chunks_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def noting(spec: ModelSpec, policy: str, context: int, **how: Any) -> dict[str, Any] | None:
        calls.append((policy, context, how["chunk"]))
        return fake(spec, policy, context, **how)

    monkeypatch.setattr(chunks, "try_peak", noting)
    given = ["--contexts", "100", "--growing", "300,400", "--chunks", "7", "--rounds", "2"]
    options = chunks.options_of([*given, "--methods", "snapkv,h2o"])
    found = [row for rows in chunks.rows_of(options) for row in rows]
    assert calls == [
        *[("snapkv", 100, None), ("snapkv", 100, 7)] * 2,
        *[("h2o", 100, None), ("h2o", 100, 7)] * 2,
        *[(name, context, 7) for context in (300, 400) for name in ("snapkv", "h2o")],
    ]
    assert [row["cpu_of_whole"] for row in found] == [
        None,
        {"median": 1.25, "lowest": 1.25, "highest": 1.25},
        *[None] * 6,
    ]
    assert chunks.TABLE.line(found[1]).split() == [
        "100", "snapkv", "7", "100.0", "0.1", "1.25", "(1.25-1.25)",
    ]  # fmt: skip
    assert chunks.TABLE.line(found[3]).split() == ["100", "h2o", "7", "-", "-"]
    assert all(len(chunks.TABLE.line(row)) <= 80 for row in found)


def test_the_picture_has_longer_prompts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "try_peak", fake)
    given = ["--contexts", "100", "--growing", "300,400", "--methods", "snapkv,h2o"]
    rows = [row for rows in chunks.rows_of(chunks.options_of(given)) for row in rows]
    assert pictures.chunks_picture({"prompts": rows}).startswith(b"\x89PNG")
    monkeypatch.setattr(pictures, "png", lambda figure: figure)
    drawn: Any = pictures.chunks_picture({"prompts": rows})
    assert drawn.axes[0].get_xticks().tolist() == [300, 400]


def test_a_quick_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def here(spec: ModelSpec, policy: str, context: int, **how: Any) -> dict[str, Any]:
        wanted = {"model": attrs.asdict(spec), "policy": policy, "context": context}
        return memory.measure({**wanted, **how})

    monkeypatch.setattr(chunks, "try_peak", here)  # not in processes of their own
    chunks.main(["--quick", "--methods", "fastkv", "--growing", "300", "--out", str(tmp_path)])
    shown = capsys.readouterr().out
    record = json.loads((tmp_path / "chunks.json").read_text())
    assert [(row["context"], row["chunk"]) for row in record["prompts"]] == [
        (256, None),
        (256, 64),
        (300, 64),
    ]
    assert all(row["peaks"][0]["cpu_ms"] > 0 for row in record["prompts"])
    chunks.main(["--show", str(tmp_path / "chunks.json")])
    assert capsys.readouterr().out == shown
