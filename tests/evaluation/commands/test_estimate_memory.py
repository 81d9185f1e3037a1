"""`kvpolicy estimate --memory`: what it prints and writes, and one line for what it refuses."""

import json
from functools import partial
from pathlib import Path

import pytest
from transformers import LlamaConfig

from kvpolicy.registry import registered
from tests.evaluation.support import Run

LLAMA = "llama-3.1-8b"
ASKED = ("--config", LLAMA, "--context", 131072, "--rate", 0.1)


@pytest.fixture
def run(run: Run) -> Run:
    return partial(run, "estimate")


def test_the_command_says_how_many_sessions_fit(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "fits.json"
    asked = (
        *ASKED,
        "-p",
        "full_context,snapkv,fastkv",
        "--memory",
        "80GB",
        "--answer-tokens",
        4096,
    )
    status, shown, err = run(*asked, "--json", file)
    assert (status, err) == (0, "")
    assert max(map(len, shown.split("\nwritten")[0].splitlines())) <= 80
    found = json.loads(file.read_text())["memory"]
    assert (found["memory"], found["answer"], found["chunk"]) == (80 * 10**9, 4096, 4096)
    assert found["weights"] == pytest.approx(16.06e9, rel=1e-3)
    assert "memory 80 GB, weights 16.06 GB, attention sdpa, answers of 4,096 tokens" in shown
    rows = {
        (each["policy"], each["prefill_chunk_size"], each["decoding_tokens"]): each
        for each in found["rows"]
    }
    assert [key[0] for key in rows] == ["full_context"] * 2 + ["snapkv"] * 4 + ["fastkv"] * 4
    full, snap = rows["full_context", None, None], rows["snapkv", None, None]
    assert full["session"]["kept_bytes"] == 131072 * 32 * 4096
    assert full["session"]["held_bytes"] >= (131072 + 4096) * 32 * 4096
    bound = rows["snapkv", None, 13107]
    assert bound["session"]["held_bytes"] < snap["session"]["held_bytes"]
    assert snap["sessions"] > 5 * full["sessions"]
    for each in rows.values():
        session = each["session"]
        assert session["peak_bytes"] == max(session["reading_bytes"], session["answering_bytes"])
        taken = found["weights"] + session["peak_bytes"]
        taken += (each["sessions"] - 1) * session["held_bytes"]
        assert taken <= found["memory"] < taken + session["held_bytes"]
    told = " ".join(shown.split())
    assert "layers after a drop read and hold only the tokens that are left: fastkv." in told
    cells = next(line for line in shown.splitlines() if line.startswith("snapkv        0.1 whole"))
    peak = f"{snap['session']['peak_bytes'] / 1e9:.2f}"
    assert cells.split()[3:] == [
        *("all", "1.72", f"{snap['session']['held_bytes'] / 1e9:.2f}", peak, "reading"),
        str(snap["sessions"]),
    ]


def test_weights_that_do_not_fit_are_said_plainly(run: Run) -> None:
    asked = (*ASKED, "-p", "snapkv", "--memory", "16GB")
    _, shown, _ = run(*asked)
    assert "The weights alone, 16.06 GB, exceed 16 GB, so that no session fits." in shown
    _, shown, _ = run(*asked, "--weights", "5GB", "--decoding-tokens", 512)
    assert "weights 5 GB" in shown
    assert "no session fits" not in shown
    assert "512" in shown


def test_a_peak_of_whole_scores_leaves_the_other_sizes_readable(run: Run) -> None:
    """gpt-oss attends eagerly: at 65,536 tokens its scores take over a thousand times the cache."""
    asked = ("--config", "gpt-oss-20b", "--context", 65536, "-p", "full_context")
    _, shown, _ = run(*asked, "--memory", "24GB")
    assert "memory 24 GB, weights 13.76 GB, attention eager" in shown
    row = next(line for line in shown.splitlines() if "whole     all" in line)
    kept, held, peak = (float(each) for each in row.split()[4:7])
    assert kept == pytest.approx(12 * (65536 + 127) * 2 * 8 * 64 * 2 / 1e9, abs=0.01)
    assert held >= kept
    assert peak > 1000
    assert max(map(len, shown.splitlines())) <= 80


def test_every_policy_has_its_rows(run: Run, tmp_path: Path) -> None:
    """Also where a policy has no rule to bound an answer by, and where a selector is in another."""
    LlamaConfig(num_hidden_layers=4, hidden_size=64, vocab_size=64).save_pretrained(tmp_path)
    file = tmp_path / "fits.json"
    asked = ("--config", tmp_path, "--context", 1024, "--rate", 0.1, "--prefill-chunk-size", 512)
    status, _, err = run(*asked, "--memory", "1GB", "--json", file)
    assert (status, err) == (0, "")
    found = json.loads(file.read_text())["memory"]["rows"]
    bounds: dict[str, set[int | None]] = {name: set() for name in registered("policy")}
    for row in found:
        bounds[row["policy"]].add(row["decoding_tokens"])
    assert bounds["kvzip"] == bounds["full_context"] == bounds["gemfilter"] == {None}
    for name in ("snapkv", "adakv", "claa", "criticalkv"):
        assert bounds[name] == {None, 102}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--memory", "lots"), "--memory must be a number of bytes such as 80GB, 24GiB or 40e9"),
        (("--memory", "1GB", "--weights", "x"), "--weights must be a number of bytes"),
        (("--answer-tokens", 5), "must be given with --answer-tokens, got --answer-tokens 5 alone"),
        (("--decoding-tokens", 5), "--memory must be given with --decoding-tokens"),
        (("--memory", "1GB", "--attention", "fast"), "--attention must be one of sdpa, flash"),
    ],
)
def test_what_is_refused(run: Run, given: tuple[object, ...], message: str) -> None:
    status, _, err = run(*ASKED, "-p", "snapkv", *given)
    assert status != 0
    assert message in err
