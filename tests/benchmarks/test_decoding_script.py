"""The benchmark of eviction while decoding: its rows by hand, and what it measures with."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import decoding
from kvpolicy.evaluation.tasks.needle import NeedleTask, load_model
from kvpolicy.policies import FullContext, StreamingLLM


def test_rows_fit_the_tables() -> None:
    ratio = {"median": 1.0345, "lowest": 0.9, "highest": 123.4567}
    row = {"rule": "StreamingLLM", "budget": 1024, "every": 128, "token_ms": [10.0, 20.0]}
    words = decoding.COSTS.line({**row, "of_none": ratio})
    assert len(words) <= 80
    assert words.split()[1:] == ["1024", "128", "15.00", "1.034", "(0.900-123.457)"]
    shares = {"rule": "none", "budget": None, "hops_1": 1.0, "hops_2": 0.125, "most_held": 512}
    assert decoding.ACCURACY.line(shares).split() == ["none", "-", "100.0%", "12.5%", "512"]


def test_a_prompt_that_is_fed_is_answered_as_one_that_is_read() -> None:
    model = load_model()
    prompts = NeedleTask(160, 1).prompts(3, seed=1)
    ids = torch.tensor([each.input_ids for each in prompts])
    said, most = decoding.answered(model, FullContext(), ids, len(prompts[0].answer))
    want = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=said.shape[1], do_sample=False
    )
    assert torch.equal(said, want[:, 160:])
    assert most == 160
    _, bounded = decoding.answered(model, decoding.bounded(StreamingLLM, 24, 8), ids, 3)
    assert bounded == 24 + 7


def test_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decoding.main(["--quick", "--threads=1", f"--out={tmp_path}"])
    record = json.loads((tmp_path / "decoding.json").read_text())
    rules = [each.__name__ for each in decoding.RULES]
    assert [row["rule"] for row in record["costs"]] == ["none", *rules]
    assert [row["rule"] for row in record["accuracy"]] == ["none", *rules]
    assert all(row["most_held"] <= 64 + 16 for row in record["accuracy"][1:])
    capsys.readouterr()
    decoding.main(["--show", str(tmp_path / "decoding.json"), "--threads=1"])
    shown = capsys.readouterr().out
    assert shown.count("\n") == 2 + 2 * (1 + len(rules))
