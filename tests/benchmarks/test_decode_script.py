"""The benchmark of decoding: its rows by hand, its file, and what it measures with."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import decode
from benchmarks.clocks import TokenTimes


def test_steps_are_those_of_tokens_after_the_first() -> None:
    clock = TokenTimes()
    clock.seconds = [0.0, 1.0, 2.0, 3.0, 4.0, 4.5, 4.6, 4.8]  # a prompt, then seven tokens
    assert clock.steps_ms(1 + decode.WARM_UP) == pytest.approx([100.0, 200.0])


def test_a_row_fits_the_table() -> None:
    ratio = {"median": 12.3456, "lowest": 1.0, "highest": 123.4567}
    row = {
        "cache": "static_cache, compiled",
        "context": 131072,
        "held": 131328,
        "token_ms": [1000.0, 2000.0, 3000.0],
        "of_static": ratio,
        "dynamic_speedup": ratio,
    }
    words = decode.TABLE.line(row)
    assert len(words) <= 80
    assert words.split()[-5:] == ["131328", "2000.00", "12.346", "(1.000-123.457)", "12.35"]


def test_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decode.main(["--quick", "--threads=1", f"--out={tmp_path}", "--new-tokens=8"])
    record = json.loads((tmp_path / "decode.json").read_text())
    held = {row["cache"]: row["held"] for row in record["rows"]}
    assert held == {
        "static_cache": 64 + 8,  # all of its buffer
        "dynamic_cache": 64 + 7,
        "everything, growing": 64 + 7,
        "fastkv, growing": 8 + 7,  # its window, which is more than a tenth
        "everything, fixed": 64 + 7,
        "fastkv, fixed": 8 + 7,
    }
    assert record["rows"][0]["of_static"] == {"median": 1.0, "lowest": 1.0, "highest": 1.0}
    shown = capsys.readouterr().out
    decode.main(["--show", str(tmp_path / "decode.json"), "--threads=1"])
    assert capsys.readouterr().out == shown


def test_only_what_is_to_be_compiled_is(monkeypatch: pytest.MonkeyPatch) -> None:
    configurations = []

    def compiled(model: torch.nn.Module, config: object) -> object:
        configurations.append(config)
        return model.__call__

    model = decode.TINY.build()
    monkeypatch.setattr(type(model), "get_compiled_call", compiled)
    prompt = decode.random_prompt(97, 64)
    for name, contender in decode.contenders(compiled=True).items():
        configurations.clear()
        decode.take_turn(model, prompt, contender, 8)
        assert len(configurations) == name.endswith("compiled")
