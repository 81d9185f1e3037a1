"""The benchmark of all methods: its rows by hand, its file, and memory in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import memory, methods
from benchmarks.common import BASELINE, ModelSpec
from kvpolicy import registered
from kvpolicy.evaluation.comparison.times import Times


def peak(growth: int, *, exact: bool = True) -> dict[str, Any]:
    return {
        "before_bytes": 1000,
        "peak_bytes": 1000 + growth,
        "growth_bytes": growth,
        "measured_by": "hand",
        "exact": exact,
    }


def test_a_row_has_medians_and_ratios_of_the_same_round() -> None:
    zeros = (0.0, 0.0, 0.0)
    full = Times((0.25, 1.0, 0.375), (0.5, 0.75, 1.0), zeros, zeros)
    ours = Times((0.125, 0.25, 0.25), (0.25, 0.25, 0.25), (1.0, 2.0, 3.0), zeros)
    limits = {"prefill_allowed": 1.8, "decode_allowed": 1.7}
    row = methods.row_of("fastkv", ours, full, 64, limits)
    assert row["prefill_speedup"] == {"median": 2.0, "lowest": 1.5, "highest": 4.0}
    assert row["decode_speedup"] == {"median": 3.0, "lowest": 2.0, "highest": 4.0}
    assert (row["prefill_allowed"], row["decode_allowed"]) == (1.8, 1.7)
    assert (row["prefill_ms"], row["prefill_cpu_ms"]) == (
        (125.0, 250.0, 250.0),
        (1000.0, 2000.0, 3000.0),
    )
    words = methods.TIMES.line(row)
    assert words.split() == [
        *("fastkv", "64", "0.25", "2.00", "2.00", "(1.50-4.00)", "1.80", "250.00", "3.00")
    ]


def test_large_numbers_fit_the_table() -> None:
    def timing(ms: float) -> Times:
        wall, cpu = (ms / 1000, ms / 800), (ms / 500, ms / 300)
        return Times(wall, wall, cpu, cpu)

    limits = {"prefill_allowed": 123.4, "decode_allowed": 1.0}
    row = methods.row_of("pyramidinfer", timing(9.9e3), timing(9.876e5), 131072, limits)
    assert len(methods.TIMES.line(row)) <= 80
    row = {"policy": "pyramidinfer", "context": 131072, "share_of_full": 1.0}
    assert len(methods.MEMORY.line({**row, "peak": peak(1 << 44, exact=False)})) <= 80


def test_every_registered_policy_is_measured() -> None:
    options = methods.main.__self__.options_of([])
    assert list(options.policies) == list(registered("policy"))


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[str, int, int]]]:
    """A quick run of three methods; peaks are told by hand, and that of one cannot be measured."""
    asked: list[tuple[str, int, int]] = []
    peaks = {BASELINE: peak(400), "snapkv": peak(300), "fastkv": peak(100, exact=False)}

    def try_peak(spec: ModelSpec, policy: str, context: int, *, threads: int) -> Any:
        asked.append((policy, context, threads))
        return peaks.get(policy)

    folder = tmp_path_factory.mktemp("quick")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(methods, "try_peak", try_peak)
        methods.main(
            [
                *("--quick", "--threads=1", "--rounds=2"),
                *("--methods=snapkv,fastkv,h2o", f"--out={folder}"),
            ]
        )
    return folder, asked


def test_quick_run_writes_times_and_memory(quick: tuple[Path, list[tuple[str, int, int]]]) -> None:
    folder, asked = quick
    record = json.loads((folder / "methods.json").read_text())
    parts = ["rows", "memory"]
    assert list(record) == ["benchmark", "settings", "versions", "machine", *parts]
    assert record["settings"]["rounds"] == {"64": 2, "128": 2}
    assert record["machine"]["threads"] == 1
    names = [BASELINE, "snapkv", "fastkv", "h2o"]
    assert [(row["policy"], row["context"]) for row in record["rows"]] == [
        (name, context) for context in (64, 128) for name in names
    ]
    for row in record["rows"]:
        for times in ("prefill_ms", "prefill_cpu_ms", "decode_ms", "decode_cpu_ms"):
            assert len(row[times]) == 2
    of = {(row["policy"], row["context"]): row for row in record["rows"]}
    ratios = [
        full / ours
        for full, ours in zip(
            of[BASELINE, 128]["prefill_ms"], of["fastkv", 128]["prefill_ms"], strict=True
        )
    ]
    assert of["fastkv", 128]["prefill_speedup"]["lowest"] == pytest.approx(min(ratios))
    assert of[BASELINE, 128]["prefill_speedup"]["median"] == 1.0
    assert of["fastkv", 128]["prefill_allowed"] > 1.0 == of["snapkv", 128]["prefill_allowed"]
    assert asked == [(name, 128, 1) for name in names]
    shares = [row["share_of_full"] for row in record["memory"]]
    assert shares == [1.0, 0.75, 0.25, None]


def test_a_result_can_be_shown_again(
    quick: tuple[Path, list[tuple[str, int, int]]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = quick
    (folder / "methods.png").unlink()
    methods.main(["--show", str(folder / "methods.json"), "--threads", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-4].split() == [BASELINE, "128", "0", "100%", "0"]
    assert lines[-2].endswith("at most")
    assert lines[-1].split() == ["h2o", "128", "failed"]
    assert (folder / "methods.png").read_bytes().startswith(b"\x89PNG")


# Keys and values weigh most here: 8 layers of 2 * 512 numbers a token.
HEAVY = ModelSpec(512, 8, 8, 8, intermediate_size=64, vocab_size=97)


def test_peak_memory_holds_the_cache_and_a_policy_needs_less() -> None:
    cache = 8 * 2 * 512 * 4 * 1024
    full = memory.try_peak(HEAVY, BASELINE, 1024)
    ours = memory.try_peak(HEAVY, "streamingllm", 1024)
    assert full is not None
    assert ours is not None
    for found in (full, ours):
        assert found["growth_bytes"] == found["peak_bytes"] - found["before_bytes"] > 0
        assert found["measured_by"].startswith(("VmHWM", "ru_maxrss"))
    if full["exact"] and ours["exact"]:
        assert cache < full["growth_bytes"] < 4 * cache
        # A layer's keys and values are whole while it attends; of the other 7, a tenth stays.
        assert ours["growth_bytes"] < full["growth_bytes"] - 0.5 * cache


def test_a_process_that_fails_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('it is too big')"]
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda _, **rest: run(command, **rest))
    assert memory.try_peak(HEAVY, "snapkv", 8) is None
    assert "snapkv at 8 tokens failed with code 1: it is too big" in capsys.readouterr().err
