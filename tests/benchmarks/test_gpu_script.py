"""The GPU benchmark on a tiny model and the CPU: its file, its order, and what may go wrong."""

import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import attrs
import pytest
import torch
from benchmarks.clocks import Deadline, Interval, OutOfTimeError, TimedPolicy
from benchmarks.gpu_answers import AnswerBench
from benchmarks.gpu_bench import Bench
from benchmarks.gpu_compiled import CompiledCell
from benchmarks.turns import GPUMemory, Turn

from benchmarks import gpu, gpu_answers, gpu_bench
from benchmarks.gpu_cells import Cell, Settings
from kvpolicy import CachePolicy

QUICK = ["--quick", "--threads", "1"]
JOBS = gpu.jobs_of([256, 512])
ORDER = [(job.policy, job.context) for job in JOBS if job.part == "cells"]
COMPILED = [(job.policy, job.context) for job in JOBS if job.part == "compiled"]
FULL = ("full_context", "full_chunks")
NUMBER = (int, float)
SCHEMA: dict[str, Any] = {
    "policy": str,
    "context": int,
    "status": str,
    "note": str,
    "rehearsal_ms": NUMBER,
    "prefill_ms": list,
    "prefill_device_ms": list,
    "decode_ms": list,
    "decode_device_ms": list,
    "scoring_ms": NUMBER,
    "scoring_prefill_ms": NUMBER,
    "held_bytes": int,
    "before_bytes": int,
    "prefill_peak_bytes": int,
    "decode_peak_bytes": int,
    "masked_layers_prefill": int,
    "masked_layers_decode": int,
    "prefill_allowed": NUMBER,
    "decode_allowed": NUMBER,
    "prefill_speedup": NUMBER,
    "decode_speedup": NUMBER,
    "generate_ms": NUMBER,
    "generate_speedup": NUMBER,
    "scoring_share": NUMBER,
}
ON_GPU_ONLY = {"before_bytes", "prefill_peak_bytes", "decode_peak_bytes"}
OF_POLICIES_ONLY = {"scoring_ms", "scoring_prefill_ms", "scoring_share"}


COMPILED_SCHEMA: dict[str, Any] = {
    "policy": str,
    "context": int,
    "status": str,
    "note": str,
    "compile_ms": NUMBER,
    "compiled_graphs": int,
    "prefill_ms": NUMBER,
    "compiled_decode_ms": list,
    "peak_bytes": int,
    "decode_allowed": NUMBER,
    "speedup_to_static": NUMBER,
    "speedup_to_uncompiled": NUMBER,
}


TESTS = """
import pytest
def test_one(): pass
def test_other(): assert not "so"
@pytest.mark.skip
def test_last(): pass
"""


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quick")
    tests = tmp_path_factory.mktemp("tests") / "test_three.py"
    tests.write_text(TESTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_answers, "RUN", (str(tests), "-c", os.devnull))
        gpu.main([*QUICK, "--out", str(folder)])
    return folder


@pytest.fixture(scope="module")
def record(quick: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((quick / "gpu.json").read_text())
    return found


def test_record_has_machine_versions_and_settings(record: dict[str, Any]) -> None:
    head = ["benchmark", "complete", "unfinished", "settings", "versions", "machine"]
    assert list(record) == [*head, "cells", "answers", "compiled", "packed", "tests"]
    assert record["complete"] is True
    assert record["versions"]["torch"] == torch.__version__
    assert {"processor", "cpus", "threads", "device"} <= record["machine"].keys()
    settings = record["settings"]
    assert (settings["model"]["preset"], settings["new_tokens"], settings["batch"]) == (
        "tiny",
        4,
        1,
    )
    assert settings["attention"] == "sdpa"
    assert settings["policies"]["full_context"] == "DynamicCache"
    assert "tsp_rate=0.2" in settings["policies"]["fastkv"]


def test_cells_follow_the_schema(record: dict[str, Any]) -> None:
    assert [each.name for each in attrs.fields(Cell)] == list(SCHEMA)
    for cell in record["cells"]:
        assert list(cell) == list(SCHEMA)
        absent = ON_GPU_ONLY | (OF_POLICIES_ONLY if cell["policy"] in FULL else set())
        if cell["context"] == 4 * 512:  # too many tokens for full context
            absent = absent | {"prefill_speedup", "decode_speedup", "generate_speedup"}
        for name, kind in SCHEMA.items():
            assert cell[name] is None if name in absent else isinstance(cell[name], kind), name
        assert cell["status"] == "measured"
        assert len(cell["prefill_ms"]) == 3
        assert len(cell["decode_ms"]) == 3  # of 4 tokens the prefill gives the first
        assert cell["prefill_device_ms"] == cell["decode_device_ms"] == []
        assert all(ms > 0 for ms in cell["prefill_ms"] + cell["decode_ms"])


def test_cells_come_by_importance(record: dict[str, Any]) -> None:
    assert [(cell["policy"], cell["context"]) for cell in record["cells"]] == ORDER


def test_compiled_cells_come_last_and_follow_their_schema(record: dict[str, Any]) -> None:
    assert [each.name for each in attrs.fields(CompiledCell)] == list(COMPILED_SCHEMA)
    assert [(cell["policy"], cell["context"]) for cell in record["compiled"]] == COMPILED
    for cell in record["compiled"]:
        assert list(cell) == list(COMPILED_SCHEMA)
        for name, kind in COMPILED_SCHEMA.items():
            absent = name == "peak_bytes"
            assert cell[name] is None if absent else isinstance(cell[name], kind), name
        assert (cell["status"], cell["note"], cell["compiled_graphs"]) == ("measured", "", 1)
        assert len(cell["compiled_decode_ms"]) == 3
        # Compiling was in the warm-up, and nothing of it in the tokens that count.
        assert 0 < sum(cell["compiled_decode_ms"]) < cell["compile_ms"]
    settings = record["settings"]["compiled"]
    assert set(settings["policies"]) == {name for name, _ in COMPILED}
    assert settings["policies"]["full_context"] == "StaticCache"
    assert settings["policies"]["fastkv"] == record["settings"]["policies"]["fastkv"]
    assert settings["config"]["backend"] == "eager"


def test_ratios_of_compiled_cells_are_to_both_kinds_of_full_context(record: dict[str, Any]) -> None:
    loops = {(cell["policy"], cell["context"]): cell for cell in record["cells"]}
    compiled = {(cell["policy"], cell["context"]): cell for cell in record["compiled"]}
    for (name, context), cell in compiled.items():
        token = median(cell["compiled_decode_ms"])
        static = median(compiled["full_context", context]["compiled_decode_ms"])
        assert cell["speedup_to_static"] == pytest.approx(static / token)
        loop = median(loops["full_context", context]["decode_ms"])
        assert cell["speedup_to_uncompiled"] == pytest.approx(loop / token)
        if (name, context) in loops:
            assert cell["decode_allowed"] == loops[name, context]["decode_allowed"]


def test_answers_have_both_kinds_of_buffers_and_their_ratios(record: dict[str, Any]) -> None:
    places = ("policy", "context", "buffers", "batch")
    assert [tuple(row[key] for key in places) for row in record["answers"]] == [
        job.place for job in JOBS if job.part == "answers"
    ]
    rows = {tuple(row[key] for key in places): row for row in record["answers"]}
    for (_, *place), row in rows.items():
        assert (row["status"], row["note"], len(row["decode_ms"])) == ("measured", "", 3)
        full = rows["full_context", *place]
        assert row["prefill_speedup"] == pytest.approx(full["prefill_ms"] / row["prefill_ms"])
        token = median(full["decode_ms"]) / median(row["decode_ms"])
        assert row["decode_speedup"] == pytest.approx(token)
        assert row["mean_speedup"] == pytest.approx(sum(full["decode_ms"]) / sum(row["decode_ms"]))


def test_packed_heads_and_tests_are_recorded(record: dict[str, Any]) -> None:
    assert [row["policy"] for row in record["packed"]] == ["adakv 0.02", "adakv 0.1"]
    for row in record["packed"]:
        assert row["found"]["kept"] <= row["found"]["held"] <= row["found"]["padded"]
        assert len(row["found"]["packed_ms"]) == gpu_answers.ROUNDS
    (row,) = record["tests"]
    (failure,) = row["found"]["failures"]
    assert row["found"] == {"passed": 1, "failed": 1, "skipped": 1, "failures": [failure]}
    assert "test_other" in failure


def extras(monkeypatch: pytest.MonkeyPatch, *run: str, seconds: float = 60.0) -> AnswerBench:
    monkeypatch.setattr(gpu_answers, "RUN", run)
    spec, _ = gpu.PRESETS["tiny"]
    settings = Settings(limit_seconds=seconds)
    return AnswerBench(Bench(spec.build(), gpu.plans_for(spec), settings, Deadline(1e9)))


def test_tests_that_cannot_run_are_told_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "test_slow.py").write_text("import time\ndef test_slow(): time.sleep(60)\n")
    late = extras(monkeypatch, str(tmp_path), "-c", os.devnull, seconds=1.0).tests()
    assert (late.status, late.note) == ("out of time", "tests stopped after 1 s")
    nothing = extras(monkeypatch, str(tmp_path / "nowhere"), "-c", os.devnull).tests()
    assert nothing.status == "failed"
    assert "nowhere" in nothing.note
    monkeypatch.setattr(gpu_answers, "find_spec", lambda name: None)
    absent = extras(monkeypatch).tests()
    assert (absent.status, absent.note) == ("absent", "skipped, since there is no pytest")


def test_the_tests_of_a_gpu_need_no_more_than_pytest() -> None:
    """They are found without the packages that other tests need, and without an installation."""
    blocked = "import sys; sys.modules['hypothesis'] = None; "
    command = [sys.executable, "-c", blocked + gpu_answers.PYTEST, "--collect-only", "-q"]
    root = Path(gpu.__file__).parents[1]
    ran = subprocess.run(
        [*command, *gpu_answers.RUN],
        cwd=root,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "test_keeps_and_says_what_the_cpu_does" in ran.stdout


def test_ratios_are_those_of_the_times_beside_them(record: dict[str, Any]) -> None:
    cells = {(cell["policy"], cell["context"]): cell for cell in record["cells"]}
    for (name, context), cell in cells.items():
        if ("full_context", context) not in cells:  # of chunks alone
            assert (name, cell["prefill_speedup"]) in [(each, None) for each in gpu.CHUNKED]
            continue
        full = cells["full_context", context]
        prefill = median(full["prefill_ms"]) / median(cell["prefill_ms"])
        assert cell["prefill_speedup"] == pytest.approx(prefill)
        decode = median(full["decode_ms"]) / median(cell["decode_ms"])
        assert cell["decode_speedup"] == pytest.approx(decode)
        whole = median(cell["prefill_ms"]) + sum(cell["decode_ms"])
        assert cell["generate_ms"] == pytest.approx(whole)
        assert cell["generate_speedup"] == pytest.approx(full["generate_ms"] / whole)


def test_bytes_and_masks_by_hand(record: dict[str, Any]) -> None:
    slot = 4 * 2 * 2 * 8 * 4  # layers, keys and values, KV heads, head_dim, bytes of a float32
    held = {
        (cell["policy"], cell["context"]): cell["held_bytes"] / slot for cell in record["cells"]
    }
    assert held["full_context", 512] == 512
    methods = ("fastkv", "snapkv", "gemfilter", "streamingllm", "h2o")
    for name in (*methods, "fastkv_chunks", "snapkv_chunks"):
        assert held[name, 512] == 51  # int(0.1 * 512)
    assert 51 < held["pyramidinfer", 512] < 512
    for cell in record["cells"]:  # none: sdpa is free to take its flash kernel
        assert cell["masked_layers_decode"] == 0
        if cell["policy"] != "full_chunks":  # Transformers makes one for all chunks but the first
            assert cell["masked_layers_prefill"] == 0


def test_scoring_is_part_of_its_prefill(record: dict[str, Any]) -> None:
    scored = [cell for cell in record["cells"] if cell["policy"] not in FULL]
    assert len(scored) == sum(policy not in FULL for policy, _ in ORDER) > 0
    for cell in scored:
        decides = cell["policy"] != "everything"  # nothing is asked where all is kept
        assert 0 <= cell["scoring_ms"] < cell["scoring_prefill_ms"]
        assert (cell["scoring_ms"] > 0) is decides
        share = cell["scoring_ms"] / cell["scoring_prefill_ms"]
        assert cell["scoring_share"] == pytest.approx(share)


def test_table_has_a_line_for_each_cell_and_fits(
    quick: Path, record: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    gpu.main([*QUICK, "--show", str(quick / "gpu.json")])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    tables = [each.splitlines() for each in shown.strip("\n").split("\n\n")]
    assert [table[0].split()[0] for table in tables] == [
        *("policy", "generate", "compiled", "unequal", "tests", "x:"),
    ]
    for part, table in zip(gpu.PARTS, tables, strict=False):
        lines = [line.split() for line in table[1:] if "masks" not in line]
        assert len(lines) == len(record[part])
        if part in ("cells", "compiled"):
            assert [(line[0], int(line[1])) for line in lines] == sorted(
                ((row["policy"], row["context"]) for row in record[part]), key=lambda row: row[1]
            )
    assert json.loads((quick / "gpu.json").read_text()) == record  # showing measures nothing
    assert (quick / "gpu.png").read_bytes().startswith(b"\x89PNG")


def test_large_numbers_fit_the_table() -> None:
    cell = Cell("streamingllm", 131072, "measured", prefill_ms=(543210.9,), decode_ms=(1234.5,))
    cell = attrs.evolve(
        cell,
        prefill_speedup=12.34,
        prefill_allowed=123.45,
        decode_speedup=12.34,
        prefill_peak_bytes=141 << 30,
        decode_peak_bytes=17 << 30,
        scoring_share=0.999,
    )
    line = gpu.CELLS.line(attrs.asdict(cell))
    assert len(line) <= 80
    assert line.split()[2:] == ["543.211", "12.34", "123.45", "1234.50", "12.34", "141.0", "99.9%"]
    assert len(gpu.CELLS.line(attrs.asdict(Cell("h2o", 8, "failed", "x" * 300)))) == 80


# What a cell is made of, on turns made by hand.

Take = Callable[..., Turn]


def turn(prefill_ms: float, *decode_ms: float) -> Turn:
    intervals = [Interval(ms, 0.0, ms / 2) for ms in (prefill_ms, *decode_ms)]
    return Turn(intervals[0], tuple(intervals[1:]), 77, GPUMemory(1, 20, 30))


class Clock:
    """Seconds that only turns move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def bench(
    monkeypatch: pytest.MonkeyPatch,
    take: Take,
    *,
    seconds: float = 1e9,
    clock: Clock | None = None,
    **settings: Any,
) -> Bench:
    """A bench over the tiny model whose turns are ``take``'s."""
    clock = Clock() if clock is None else clock
    monkeypatch.setattr(gpu_bench, "take_turn", take)
    spec, _ = gpu.PRESETS["tiny"]
    deadline = Deadline(seconds, clock)
    return Bench(spec.build(), gpu.plans_for(spec), Settings(**settings), deadline, clock)


def run(bench: Bench, *cells: tuple[str, int]) -> list[Cell]:
    measured = [bench.run(*cell) for cell in cells]
    assert measured == bench.cells[-len(measured) :]
    return measured


def test_a_cell_is_warmed_up_rehearsed_repeated_and_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[int, int, bool, bool]] = []

    def take(model: Any, prompt: Any, policy: Any, new_tokens: int, **rest: Any) -> Turn:
        scored, watched = isinstance(policy, TimedPolicy), rest["masks"] is not None
        taken.append((prompt.shape[1], new_tokens, scored, watched))
        return turn(100.0 + len(taken), *[1.0 * len(taken)] * (new_tokens - 1))

    found = run(bench(monkeypatch, take, new_tokens=7, repeats=2), ("snapkv", 600), ("snapkv", 700))
    one_cell = [(7, False, True), (7, False, False), (1, False, False), (1, True, False)]
    assert taken == [
        (512, 4, False, False),  # once for a policy, short
        *((600, *each) for each in one_cell),
        *((700, *each) for each in one_cell),
    ]
    assert found[0].rehearsal_ms == 102.0
    assert found[0].prefill_ms == (103.0, 104.0)
    assert found[0].prefill_device_ms == (51.5, 52.0)
    assert found[0].decode_ms == (3.0,) * 6
    assert found[0].decode_device_ms == (1.5,) * 6
    assert found[0].generate_ms == 103.5 + 18.0
    assert found[0].scoring_prefill_ms == 105.0
    assert (found[0].before_bytes, found[0].prefill_peak_bytes) == (1, 20)
    assert (found[0].decode_peak_bytes, found[0].held_bytes) == (30, 77)


@pytest.mark.parametrize(
    ("rehearsal_s", "repeats"), [(0.1, 3), (10.0, 3), (13.0, 2), (29.0, 1), (500.0, 1)]
)
def test_repeats_fit_the_seconds_of_a_cell(rehearsal_s: float, repeats: int) -> None:
    assert Settings(repeats=3, cell_seconds=30.0).repeats_of(rehearsal_s * 1e3) == repeats


def test_speedups_are_full_context_over_the_policy() -> None:
    full = Cell("full_context", 8, "measured", prefill_ms=(8.0, 9.0, 99.0), decode_ms=(4.0, 4.0))
    fast = Cell("fastkv", 8, "measured", prefill_ms=(6.0, 3.0), decode_ms=(1.0, 2.0))
    full, fast = attrs.evolve(full, generate_ms=17.0), attrs.evolve(fast, generate_ms=7.5)
    found = fast.against(full)
    assert (found.prefill_speedup, found.decode_speedup) == (2.0, 4.0 / 1.5)
    assert found.generate_speedup == 17.0 / 7.5
    # Fewer tokens were decoded: the whole cannot be compared, a token can.
    shorter = attrs.evolve(fast, decode_ms=(1.0,)).against(full)
    assert (shorter.decode_speedup, shorter.generate_speedup) == (4.0, None)
    nothing = Cell("h2o", 8, "out of memory").against(full)
    assert nothing == Cell("h2o", 8, "out of memory")


def test_without_full_context_there_are_no_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    take: Take = lambda *_, **__: turn(10.0, 1.0)  # noqa: E731
    subject = bench(monkeypatch, take)
    found = run(subject, ("snapkv", 8), ("full_context", 16), ("snapkv", 16))
    assert [cell.prefill_speedup for cell in found] == [None, 1.0, 1.0]


def test_out_of_memory_is_recorded_and_its_tensors_are_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def take(model: Any, prompt: Any, policy: CachePolicy | None, *_: Any, **__: Any) -> Turn:
        if policy is None and prompt.shape[1] == 16:
            activations = torch.zeros(3)
            activations.own = activations  # type: ignore[attr-defined]  # hangs in a cycle
            held.append(weakref.ref(activations))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried\nto allocate")
        assert not held or held[0]() is None
        return turn(10.0, 1.0)

    found = run(bench(monkeypatch, take), ("full_context", 16), ("snapkv", 16), ("fastkv", 16))
    assert held
    assert [cell.status for cell in found] == ["out of memory", "measured", "measured"]
    assert found[0] == Cell("full_context", 16, "out of memory", "CUDA out of memory. Tried")
    assert found[1].prefill_speedup is None


def test_a_failure_costs_one_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(model: Any, prompt: Any, policy: Any, *_: Any, **__: Any) -> Turn:
        if policy is None:
            raise RuntimeError("no kernel image")
        return turn(10.0, 1.0)

    found = run(bench(monkeypatch, take), ("full_context", 16), ("snapkv", 16))
    assert (found[0].status, found[1].status) == ("failed", "measured")
    assert found[0].note.startswith("RuntimeError: no kernel image (take:")


def test_what_does_not_fit_the_time_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of n takes (n / 8)**2 s, a token 1 s: the third length needs 2 * 16 + 3 * 1 s."""
    clock = Clock()

    def take(model: Any, prompt: Any, policy: Any, new_tokens: int, **_: Any) -> Turn:
        prefill = (prompt.shape[1] / 8) ** 2
        clock.now += prefill + new_tokens - 1
        return turn(1e3 * prefill, *[1e3] * (new_tokens - 1))

    settings = {"new_tokens": 3, "repeats": 1}
    cells = [("full_context", 8), ("full_context", 16), ("full_context", 32), ("snapkv", 8)]
    # Warm-up 1 + 3, then rehearsals and runs of 2 tokens after the first: 3 + 3 and 6 + 6.
    spent = 4 + (3 + 3) + (6 + 6)
    fits = bench(monkeypatch, take, seconds=spent + 36, clock=clock, **settings)
    assert [cell.status for cell in run(fits, *cells[:3])] == ["measured"] * 3
    clock.now = 0.0
    tight = bench(monkeypatch, take, seconds=spent + 34, clock=clock, **settings)
    found = run(tight, *cells)
    assert [cell.status for cell in found] == ["measured", "measured", "skipped", "measured"]
    assert found[2].note == "may need 35 s, 34 s were left"
    clock.now = 1e6
    assert run(tight, ("fastkv", 8)) == [Cell("fastkv", 8, "skipped", "no time was left")]


def test_time_that_ends_in_a_cell_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = 0

    def take(model: Any, prompt: Any, policy: Any, new_tokens: int, **_: Any) -> Turn:
        nonlocal turns
        turns += 1
        if turns == 4:  # warm-up, rehearsal, the run that decodes, and no more
            raise OutOfTimeError
        return turn(10.0, *[1.0] * (5 if new_tokens == 9 else new_tokens - 1))

    (cell,) = run(bench(monkeypatch, take, new_tokens=9), ("snapkv", 16))
    assert (cell.status, cell.note) == ("measured", "time ended 3 tokens early")
    assert (cell.prefill_ms, cell.decode_ms) == ((10.0,), (1.0,) * 5)


def test_a_rehearsal_counts_where_time_allows_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(model: Any, prompt: Any, policy: Any, new_tokens: int, **rest: Any) -> Turn:
        if new_tokens == 9 and rest["masks"] is None:
            raise OutOfTimeError
        return turn(10.0, *[2.0] * min(4, new_tokens - 1))

    (cell,) = run(bench(monkeypatch, take, new_tokens=9), ("full_context", 16))
    assert (cell.status, cell.rehearsal_ms) == ("measured", 10.0)
    assert cell.note == "the rehearsal only; time ended 4 tokens early"
    assert (cell.prefill_ms, cell.decode_ms) == ((10.0,), (2.0,) * 4)


def test_masks_are_told_of_since_they_cost_sdpa_its_flash_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def take(model: Any, prompt: Any, policy: Any, new_tokens: int, **rest: Any) -> Turn:
        if rest["masks"] is not None:
            rest["masks"].prefill, rest["masks"].decode = 32, 4
        return turn(10.0)

    (cell,) = run(bench(monkeypatch, take, new_tokens=9), ("snapkv", 16))
    assert (cell.masked_layers_prefill, cell.masked_layers_decode) == (32, 4)
    assert cell.note == "time ended 8 tokens early; attention masks in 36 layers"
    lines = gpu.table({"cells": [attrs.asdict(cell)]}).splitlines()
    assert lines[2] == f"snapkv, 16 tokens: {cell.note}"
    assert max(map(len, lines)) <= 80


def test_time_that_ends_in_the_first_prefill_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real model: the clock jumps inside its second layer, whose successor is late."""
    clock = Clock()
    subject = bench(monkeypatch, gpu_bench.take_turn, seconds=100.0, clock=clock)
    layers = subject.model.get_decoder().layers

    def jump(*_: Any) -> None:
        clock.now += 150.0

    with layers[1].self_attn.register_forward_pre_hook(jump):
        cells = run(subject, ("fastkv", 64), ("snapkv", 64))
    assert [cell.status for cell in cells] == ["out of time", "skipped"]
    assert cells[0].note == "no prefill done after 150 s"
    assert not any(layer._forward_pre_hooks for layer in layers)


def test_the_file_is_written_after_every_cell(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A run that is killed at the second length leaves the first."""
    contexts: list[int] = []

    def take(model: Any, prompt: Any, policy: Any, new_tokens: int, **_: Any) -> Turn:
        contexts.append(prompt.shape[1])
        if prompt.shape[1] == 512:
            raise KeyboardInterrupt
        return turn(10.0, *[1.0] * (new_tokens - 1))

    monkeypatch.setattr(gpu_bench, "take_turn", take)
    with pytest.raises(KeyboardInterrupt):
        gpu.main([*QUICK, "--parts", "cells", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["complete"] is False
    assert [(cell["policy"], cell["context"]) for cell in found["cells"]] == ORDER[:8]
    assert ORDER[8] == ("full_context", 512)
    assert [path.name for path in tmp_path.iterdir()] == ["gpu.json"]


def test_of_few_parts_a_run_is_complete_and_has_one_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_bench, "take_turn", lambda *_, **__: turn(10.0, 1.0))
    few = ["--policies", "full_context", "--contexts", "16", "--parts", "cells"]
    gpu.main([*QUICK, *few, "--out", str(tmp_path)])
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert (found["complete"], found["compiled"], found["answers"]) == (True, [], [])
    shown = capsys.readouterr().out
    assert "generate" not in shown
    assert "compile s" not in shown
    assert "above 1 a policy is faster" in shown


def test_what_matters_most_comes_first() -> None:
    lengths = [2048, 8192, 32768, 131072]
    jobs = gpu.jobs_of(lengths)
    assert len(set(map(str, jobs))) == len(jobs)
    assert {job.part for job in jobs} == set(gpu.PARTS)
    first = jobs[: 3 * len(gpu.MAIN)]
    assert [(job.policy, job.context) for job in first] == [
        (name, length) for length in lengths[:3] for name in gpu.MAIN
    ]
    # A policy's ratios need full context, which comes before it everywhere.
    for job in jobs:
        if job.part in ("answers", "compiled") or job.policy in gpu.MAIN:
            full = attrs.evolve(job, policy="full_context")
            assert jobs.index(full) <= jobs.index(job)
    assert {job.policy for job in jobs if job.part in gpu.PARTS[:3]} == set(
        gpu.plans_for(gpu.LLAMA)
    )
    assert {job.batch for job in jobs} == {1, 8}
    assert {job.context for job in jobs if job.policy == "fastkv_chunks"} == {131072, 524288}


# Starts that go on where another ended.

CELLS_OF = ["--policies", "full_context,snapkv", "--contexts", "16", "--parts", "cells"]


def start(folder: Path, *arguments: str) -> dict[str, Any]:
    gpu.main([*QUICK, *CELLS_OF, "--out", str(folder), *arguments])
    found: dict[str, Any] = json.loads((folder / "gpu.json").read_text())
    return found


def killed_in(policy: str | None, taken: list[str]) -> Take:
    """Turns of which that of a policy ends the process."""

    def take(model: Any, prompt: Any, given: Any, new_tokens: int, **_: Any) -> Turn:
        name = "full_context" if given is None else "snapkv"
        taken.append(name)
        if name == policy:
            raise KeyboardInterrupt
        return turn(10.0, *[1.0] * (new_tokens - 1))

    return take


def test_a_second_start_goes_on_where_the_first_was_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    taken: list[str] = []
    monkeypatch.setattr(gpu_bench, "take_turn", killed_in("snapkv", taken))
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path)
    first = json.loads((tmp_path / "gpu.json").read_text())
    assert first["unfinished"] == {"cells/snapkv/16/1": 1}
    assert [cell["policy"] for cell in first["cells"]] == ["full_context"]
    taken.clear()
    monkeypatch.setattr(gpu_bench, "take_turn", killed_in(None, taken))
    second = start(tmp_path)
    assert set(taken) == {"snapkv"}
    assert second["cells"][0] == first["cells"][0]
    assert (second["complete"], second["unfinished"]) == (True, {})
    # The ratio is to what the first start has measured.
    assert second["cells"][1]["prefill_speedup"] == 1.0
    taken.clear()
    assert start(tmp_path) == second
    assert not taken


def test_full_context_that_is_measured_last_gives_the_ratios_of_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first start has time for the policy alone, which is faster."""
    clock = Clock()
    monkeypatch.setattr(gpu.time, "monotonic", clock)

    def take(model: Any, prompt: Any, policy: Any, new_tokens: int, **how: Any) -> Turn:
        seconds = 10.0 if policy is None else 1.0
        clock.now += seconds * (prompt.shape[1] / 16) ** 2
        how["deadline"].check()
        return turn(1e3 * seconds, *[seconds] * (new_tokens - 1))

    monkeypatch.setattr(gpu_bench, "take_turn", take)
    how = ["--contexts", "16,32", "--repeats", "1"]
    first = start(tmp_path, *how, "--minutes", "1")
    statuses = {(row["policy"], row["context"]): row["status"] for row in first["cells"]}
    assert statuses["full_context", 32] == "skipped"
    assert statuses["snapkv", 32] == "measured"
    second = start(tmp_path, *how, "--minutes", "60")
    assert second["complete"] is True
    ratios = {(row["policy"], row["context"]): row["prefill_speedup"] for row in second["cells"]}
    assert ratios == {
        (name, length): speed
        for name, speed in (("full_context", 1.0), ("snapkv", 10.0))
        for length in (16, 32)
    }


def test_a_cell_that_is_killed_twice_has_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    taken: list[str] = []
    monkeypatch.setattr(gpu_bench, "take_turn", killed_in("full_context", taken))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path)
    third = start(tmp_path)
    assert [cell["status"] for cell in third["cells"]] == ["failed", "measured"]
    assert third["cells"][0]["note"] == "the process ended in it 2 times"
    assert (third["complete"], third["unfinished"]) == (True, {})
    assert list(third["cells"][0]) == list(SCHEMA)


def test_three_starts_of_a_few_minutes_give_one_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A turn takes 20 s, so that a cell of 6 takes 2 minutes: the third begins with one left."""
    clock = Clock()
    monkeypatch.setattr(gpu.time, "monotonic", clock)

    def take(*given: Any, deadline: Deadline, **_: Any) -> Turn:
        deadline.check()
        clock.now += 20.0
        return turn(10.0, *[1.0] * (given[3] - 1))

    monkeypatch.setattr(gpu_bench, "take_turn", take)
    lengths = ["--contexts", "16,17", "--minutes", "4"]
    first = start(tmp_path, *lengths)
    statuses = [[row["status"] for row in first["cells"]]]
    while not first["complete"] and len(statuses) < 5:
        first = start(tmp_path, *lengths)
        statuses.append([row["status"] for row in first["cells"]])
    done = [row.count("measured") for row in statuses]
    assert done == sorted(done)
    assert (len(statuses), done[-1]) == (2, 4)
    assert "skipped" in statuses[0]
    places = [(row["policy"], row["context"]) for row in first["cells"]]
    assert sorted(places) == sorted(
        (name, length) for name in ("full_context", "snapkv") for length in (16, 17)
    )
    assert first["unfinished"] == {}


def test_a_cell_that_exceeds_its_limit_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = Clock()
    monkeypatch.setattr(gpu.time, "monotonic", clock)

    def take(model: Any, prompt: Any, policy: Any, new_tokens: int, **how: Any) -> Turn:
        if policy is None:
            assert 119.0 < how["deadline"].left() <= 120.0
            clock.now += 121.0
            how["deadline"].check()
        return turn(10.0, *[1.0] * (new_tokens - 1))

    monkeypatch.setattr(gpu_bench, "take_turn", take)
    found = start(tmp_path)
    assert [cell["status"] for cell in found["cells"]] == ["out of time", "measured"]
    assert found["complete"] is True
    assert Settings().limit_of(524288) == 4 * Settings().limit_of(131072) == 480.0


def test_other_settings_are_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_bench, "take_turn", lambda *_, **__: turn(10.0, 1.0, 1.0, 1.0))
    before = start(tmp_path)
    with pytest.raises(ValueError, match="of other settings.*differs in new_tokens.*--again"):
        start(tmp_path, "--new-tokens", "7")
    assert json.loads((tmp_path / "gpu.json").read_text()) == before
    assert start(tmp_path, "--new-tokens", "7", "--again")["settings"]["new_tokens"] == 7


def test_a_prompt_that_takes_long_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[int, int]] = []

    def take(model: Any, prompt: Any, policy: Any, new_tokens: int, **_: Any) -> Turn:
        taken.append((prompt.shape[1], new_tokens))
        return turn(1e3 * prompt.shape[1], *[1.0] * (new_tokens - 1))

    subject = bench(monkeypatch, take, new_tokens=3, repeats=1)
    run(subject, ("fastkv_chunks", 8))
    assert subject.predicted_seconds("fastkv_chunks", 32) == 8 * 16 + 0.003
    taken.clear()
    (cell,) = run(subject, ("fastkv_chunks", 32))
    assert taken == [(32, 3)]
    assert (cell.note, cell.prefill_ms, cell.scoring_ms) == (
        *("read once, without a rehearsal", (32e3,)),
        None,
    )


def test_llama_has_the_published_shape_and_the_papers_layers() -> None:
    config = gpu.LLAMA.config()
    with torch.device("meta"):
        model = gpu.LLAMA.build("meta", torch.bfloat16)
    assert sum(each.numel() for each in model.parameters()) == 8_030_261_248
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    assert config.rope_parameters["rope_type"] == "llama3"
    plans = gpu.plans_for(gpu.LLAMA)
    acting = {
        name: plans[name].policy.propagation.acting_layers(32)  # type: ignore[union-attr]
        for name in ("fastkv", "gemfilter")
    }
    assert acting == {"fastkv": {15}, "gemfilter": {13}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "fastkv,snap"], "--policies must be among full_context"),
        (["--parts", "cells,loops"], "--parts must be among cells, answers"),
        (["--minutes", "0"], "--minutes must be above 0"),
        (["--new-tokens", "1"], "at least 2"),
        (["--contexts", "0"], "at least 1"),
    ],
)
def test_bad_options(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        gpu.main([*QUICK, *arguments])
    assert message in capsys.readouterr().err


def test_a_gpu_is_asked_for_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "needs a GPU that torch can see" in capsys.readouterr().err
