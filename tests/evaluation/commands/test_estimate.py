"""`kvpolicy estimate`: what it prints and writes, and one line for what it refuses."""

import json
import re
from functools import partial
from pathlib import Path

import pytest

from kvpolicy.registry import registered
from tests.evaluation.support import Run, works

LLAMA, NEMO = "llama-3.1-8b", "mistral-nemo-12b"


@pytest.fixture
def run(run: Run) -> Run:
    return partial(run, "estimate")


def rows_of(shown: str) -> list[list[str]]:
    """The table's rows, which stand after the first empty line and its two header lines."""
    lines = [line.rstrip() for line in shown.splitlines()]
    table = lines[lines.index("") + 1 :]
    return [line.split() for line in table[2 : table.index("")]]


def test_the_command_shows_and_writes_the_same_numbers(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "new" / "costs.json"
    shown = works(run("--config", LLAMA.upper(), "--context", 131072, "--json", file))
    assert max(map(len, shown.split("\nwritten")[0].splitlines())) <= 80
    assert list(file.parent.iterdir()) == [file]
    data = json.loads(file.read_text())
    assert data["settings"] == {
        "config": LLAMA.upper(),
        "context": 131072,
        "answer_tokens": 1024,
        "dtype": "bfloat16",
    }
    assert [layer["token_bytes"] for layer in data["model"]["layers"]] == [4096] * 32
    assert data["weight_bytes"] == 2 * 8030261248
    assert f"model {LLAMA}, weights 16.06 GB" in shown
    assert "prompt of 131,072 tokens, full cache 17.18 GB" in shown
    rows = rows_of(shown)
    assert [row["policy"] for row in data["rows"]] == [row[0] for row in rows]
    assert {row[0] for row in rows} == set(registered("policy"))
    for cells, row in zip(rows, data["rows"], strict=True):
        if row["prefill_compute_rate"] is None:  # known once a prompt is read
            assert cells[2] == "-"
            assert f"{cells[0]} decides by the prompt's content" in shown
            continue
        assert cells[2] == f"{100 * row['prefill_compute_rate']:.1f}"
        assert cells[3] == f"{sum(row['kept_tokens']) / 32:,.0f}"
        assert cells[4] == f"{row['kv_bytes'] / 1e9:.2f}"
        assert cells[5] == f"{100 * row['kv_share']:.1f}"
        assert cells[6] == f"{row['answered_kv_bytes'] / 1e9:.2f}"
        assert row["answered_tokens"] == [tokens + 1024 for tokens in row["kept_tokens"]]
    (fast,) = (row for row in rows if row[:2] == ["fastkv", "0.1"])
    assert fast[2:] == ["60.0", "13,107", "1.72", "10.0", "1.85"]
    (full,) = (row for row in rows if row[0] == "full_context")
    assert full[3:6] == ["131,072", "17.18", "100.0"]  # 32 layers x 2 x 8 x 128 x 2 bytes a token
    assert "fastkv drops tokens after layer 15 of 0 to 31." in shown
    assert "positions that the model is made for" not in shown


def test_the_command_takes_policies_rates_and_parameters(run: Run) -> None:
    shape = ("--config", LLAMA, "--context", 8192)
    chosen = ("--policies", "gem-filter,fastkv", "-p", "snapkv", "-r", 0.3)
    status, shown, _ = run(*shape, *chosen, "--set", "filter_layer=13", "--dtype", "float32")
    assert status == 0
    gem, fast, snap = rows_of(shown)
    assert gem[:3] == ["gemfilter", "0.3", "70.6"]
    assert fast[:3] == ["fastkv", "0.3", "65.0"]
    assert (snap[3], snap[4]) == ("2,458", "0.64")
    assert "gemfilter chooses tokens and restarts at layer 13 of 0 to 31." in shown
    assert "fastkv 0.3: tsp_rate is 0.3" in shown
    assert shown.endswith("Scoring is not counted.\n")


def test_a_bound_on_the_answer(run: Run) -> None:
    """2,000 tokens after each choice, and those since: 4,096 are 16 times 256."""
    shape = ("--config", LLAMA, "--context", 32768, "-p", "full_context,snapkv", "-r", 0.1)
    bound = ("--decoding-tokens", 2000, "--decoding-every", 256)
    for tokens, held in ((4096, 2000), (4100, 2004), (100, 3276.8 + 100)):
        full, snap = rows_of(run(*shape, *bound, "--answer-tokens", tokens)[1])
        assert full[-1] == f"{(32768 + tokens) * 32 * 4096 / 1e9:.2f}"
        assert snap[-1] == f"{held * 32 * 4096 / 1e9:.2f}"


def test_notes_on_long_prompts_and_on_scoring(run: Run) -> None:
    shown = run("--config", NEMO, "--context", 131073, "-p", "h2o,full_context", "-r", 0.1)[1]
    said = " ".join(shown.split())
    assert "The prompt exceeds the 131,072 positions that the model is made for." in said
    assert "it costs most under policies that read all queries: h2o." in said


def test_the_command_refuses_files_it_cannot_write(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for where, said in ((tmp_path, "must be a file, got the folder"), (file / "x", "not a folder")):
        status, out, err = run("--config", LLAMA, "--context", 64, "--json", where)
        assert (status, out) == (1, "")
        assert said in err
    assert file.read_text() == "mine"


def test_the_documented_output_is_the_commands(run: Run) -> None:
    page = (Path(__file__).parents[3] / "docs" / "estimate.md").read_text(encoding="utf-8")
    shown = re.search(r"^```\n\$ kvpolicy estimate (.+?[^\\])\n(.+?)\n```$", page, re.DOTALL | re.M)
    assert shown is not None
    status, out, _ = run(*shown[1].replace("\\\n", " ").split())
    assert status == 0
    assert [line.rstrip() for line in out.splitlines()] == shown[2].splitlines()


def test_notes_on_sliding_windows(run: Run) -> None:
    """The default layer is the nearest that sees all; what cannot be is said."""
    shape = ("--config", "google/gemma-3-27b-it", "-r", 0.1)
    told = ("-p", "fastkv,gemfilter,pyramidinfer")
    said = " ".join(run(*shape, "--context", 32768, *told)[1].split())
    assert "52 of 62 layers see only a sliding window of 1,024 tokens, and keep this window" in said
    assert "fastkv drops tokens after layer 29 of 0 to 61." in said
    assert (
        "gemfilter restarts the prefill, which PolicyCache refuses for prompts longer than" in said
    )
    assert "pyramidinfer drops tokens after layers with a sliding window, which" in said
    assert "fastkv drops tokens after layers" not in said
    told = ("-p", "fastkv", "--set", "tsp_layer=30")
    said = " ".join(run(*shape, "--context", 32768, *told)[1].split())
    assert "fastkv drops tokens after layers with a sliding window" in said
    assert "layers that see the whole prompt: 5, 11, 17, 23, 29, 35, 41, 47, 53, 59." in said
    assert "see only a sliding window" not in run(*shape, "--context", 1024, *told)[1]
