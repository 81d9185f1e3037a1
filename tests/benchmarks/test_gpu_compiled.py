"""Cells of compiled decoding, on answers made by hand, and what may go wrong with them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from benchmarks import gpu, gpu_bench, gpu_compiled
from benchmarks.clocks import OutOfTimeError
from benchmarks.compiled import Answer, Compilations
from benchmarks.gpu_cells import Cell
from benchmarks.gpu_compiled import CompiledBench, CompiledCell
from tests.benchmarks.test_gpu_script import QUICK, Clock, bench, turn

POLICIES = gpu.plans_for(gpu.TINY)

Generate = Callable[..., Answer]


def answer(prefill_ms: float, *decode_ms: float) -> Answer:
    return Answer(torch.zeros(1, 1 + len(decode_ms)), prefill_ms, decode_ms, 77)


def compiled_bench(
    monkeypatch: pytest.MonkeyPatch,
    generate: Generate,
    done: list[Cell] | None = None,
    **how: Any,
) -> CompiledBench:
    """A bench whose answers are ``generate``'s, behind uncompiled cells that are ``done``."""
    monkeypatch.setattr(gpu_compiled, "generate_timed", generate)
    inner = bench(monkeypatch, gpu_bench.take_turn, **how)
    inner.cells += done or []
    return CompiledBench(inner)


def run(bench: CompiledBench, *cells: tuple[str, int]) -> list[CompiledCell]:
    measured = [bench.run(*cell) for cell in cells]
    assert measured == bench.cells[-len(measured) :]
    return measured


def compilations(monkeypatch: pytest.MonkeyPatch, *graphs: int, skips: int = 0) -> None:
    """What is compiled before, after the warm-up, and after what is measured."""
    readings = iter([Compilations(count, skips if count else 0) for count in graphs])
    monkeypatch.setattr(Compilations, "so_far", staticmethod(lambda: next(readings)))


def test_a_cell_is_warmed_up_and_measured_once_at_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[int, bool, int, int]] = []

    def generate(model: Any, prompt: Any, policy: Any, new_tokens: int, **how: Any) -> Answer:
        taken.append((prompt.shape[1], policy is None, new_tokens, how["room"]))
        slow = 1000.0 if new_tokens == 5 else 3.0  # compiling
        return answer(20.0, slow, *[4.0 if policy is None else 2.0] * (new_tokens - 2))

    loop = Cell("full_context", 16, "measured", prefill_ms=(9.0,), decode_ms=(6.0, 7.0, 8.0))
    subject = compiled_bench(monkeypatch, generate, [loop], new_tokens=9)
    compilations(monkeypatch, 0, 1, 1, 1, 2, 2)
    full, fast = run(subject, ("full_context", 16), ("fastkv", 16))
    assert taken == [(16, True, 5, 9), (16, True, 9, 9), (16, False, 5, 9), (16, False, 9, 9)]
    assert (full.status, full.note, full.compiled_graphs) == ("measured", "", 1)
    assert (full.compile_ms, fast.compile_ms) == (1012.0, 1006.0)
    assert full.compiled_decode_ms == (3.0, *(4.0,) * 7)
    assert (full.prefill_ms, full.peak_bytes, full.decode_allowed) == (20.0, 77, 1.0)
    assert (full.speedup_to_static, full.speedup_to_uncompiled) == (1.0, 7.0 / 4.0)
    assert (fast.speedup_to_static, fast.speedup_to_uncompiled) == (2.0, 3.5)


def test_few_tokens_are_no_more_in_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    def generate(model: Any, prompt: Any, policy: Any, new_tokens: int, **how: Any) -> Answer:
        counts.append(new_tokens)
        return answer(1.0, *[1.0] * (new_tokens - 1))

    run(compiled_bench(monkeypatch, generate, new_tokens=3), ("fastkv", 8))
    assert counts == [3, 3]


@pytest.mark.parametrize(
    ("graphs", "skips", "note"),
    [
        ((4, 5, 5), 0, ""),
        ((0, 0, 0), 0, "nothing was compiled"),
        ((0, 1, 2), 0, "compiled again while measured"),
        ((0, 2, 2), 3, "without CUDA graphs"),
    ],
)
def test_what_torch_has_not_done_as_meant_is_said(
    monkeypatch: pytest.MonkeyPatch, graphs: tuple[int, ...], skips: int, note: str
) -> None:
    subject = compiled_bench(monkeypatch, lambda *_, **__: answer(1.0, 1.0), new_tokens=2)
    compilations(monkeypatch, *graphs, skips=skips)
    (cell,) = run(subject, ("snapkv", 8))
    assert (cell.note, cell.compiled_graphs) == (note, graphs[1] - graphs[0])
    assert (cell.speedup_to_static, cell.speedup_to_uncompiled) == (None, None)


def test_a_cell_may_need_two_prefills_its_tokens_and_what_compiling_has_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the uncompiled cell and of the shorter compiled one, what is more."""
    loops = [
        Cell("fastkv", 8, "measured", prefill_ms=(1e3,), decode_ms=(1e3,)),
        Cell("fastkv", 16, "measured", prefill_ms=(5e3, 7e3, 8e3), decode_ms=(2e3,)),
        Cell("fastkv", 32, "out of memory"),
        Cell("snapkv", 8, "measured", prefill_ms=(1e3,)),
    ]
    subject = compiled_bench(monkeypatch, lambda *_, **__: answer(1.0), loops, new_tokens=10)
    assert subject.predicted_seconds("fastkv", 8) == 60 + 2 * 1 + 10 * 1
    assert subject.predicted_seconds("snapkv", 8) == 60 + 2 * 1
    assert subject.predicted_seconds("fastkv", 32) == 60
    found = CompiledCell("fastkv", 8, "measured", compile_ms=80e3, prefill_ms=2e3)
    subject.cells.append(attrs.evolve(found, compiled_decode_ms=(1e2, 3e3, 3e3)))
    assert subject.predicted_seconds("fastkv", 16) == 80 + 2 * max(7, 2 * 4) + 10 * 3
    assert subject.predicted_seconds("fastkv", 32) == 80 + 2 * (2 * 16) + 10 * 3
    assert subject.predicted_seconds("snapkv", 8) == 80 + 2 * 1


def test_what_may_not_fit_is_skipped_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()

    def generate(model: Any, prompt: Any, policy: Any, new_tokens: int, **_: Any) -> Answer:
        clock.now += 25.0
        return answer(1e3, *[1e3] * (new_tokens - 1))  # of compiling, which comes first, 1 s

    how = {"seconds": 61.0, "clock": clock, "new_tokens": 2}
    loop = Cell("snapkv", 8, "measured", prefill_ms=(1e3,))
    subject = compiled_bench(monkeypatch, generate, [loop], **how)
    found = run(subject, ("snapkv", 8), ("fastkv", 8), ("fastkv", 32))
    assert [cell.status for cell in found] == ["skipped", "measured", "skipped"]
    assert found[0].note == "may need 62 s, 61 s were left"
    assert found[2].note == "may need 35 s, 11 s were left"  # 1 + 2 * 16 + 2 * 1
    clock.now = 100.0
    (late,) = run(subject, ("h2o", 8))
    assert late == CompiledCell("h2o", 8, "skipped", "no time was left")


@pytest.mark.parametrize("at", ["warm-up", "prefill", "first token"])
def test_time_that_ends_before_a_token_counts_is_the_cells_status(
    monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    clock, calls = Clock(), 0

    def generate(model: Any, prompt: Any, policy: Any, new_tokens: int, **_: Any) -> Answer:
        nonlocal calls
        calls += 1
        clock.now += 15.0
        if at == "warm-up" or (at == "prefill" and calls == 2):
            raise OutOfTimeError
        return answer(1.0, *[1.0] * (0 if calls == 2 else new_tokens - 1))

    (cell,) = run(compiled_bench(monkeypatch, generate, clock=clock), ("snapkv", 8))
    seconds = 15 if at == "warm-up" else 30
    note = f"no compiled token timed after {seconds} s"
    assert cell == CompiledCell("snapkv", 8, "out of time", note)


def test_time_that_ends_among_tokens_keeps_what_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def generate(model: Any, prompt: Any, policy: Any, new_tokens: int, **_: Any) -> Answer:
        return answer(1.0, *[1.0] * (5 if new_tokens == 9 else new_tokens - 1))

    compilations(monkeypatch, 0, 1, 1)
    (cell,) = run(compiled_bench(monkeypatch, generate, new_tokens=9), ("snapkv", 8))
    assert (cell.status, cell.note) == ("measured", "time ended 3 tokens early")
    assert cell.compiled_decode_ms == (1.0,) * 5


@pytest.mark.parametrize(
    ("error", "status", "note"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nto"), "out of memory", "CUDA out of"),
        (RuntimeError("no compiler"), "failed", "RuntimeError: no compiler (generate:"),
    ],
)
def test_a_failure_costs_one_cell(
    monkeypatch: pytest.MonkeyPatch, error: Exception, status: str, note: str
) -> None:
    def generate(model: Any, prompt: Any, policy: Any, *_: Any, **__: Any) -> Answer:
        if policy is None:
            raise error
        return answer(1.0, 1.0)

    full, fast = run(compiled_bench(monkeypatch, generate), ("full_context", 8), ("fastkv", 8))
    assert (full.status, fast.status) == (status, "measured")
    assert full.note.startswith(note)
    assert fast.speedup_to_static is None


def test_the_file_is_written_after_every_compiled_cell(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A run that is killed in its second one leaves the first, behind all others."""

    def generate(model: Any, prompt: Any, policy: Any, new_tokens: int, **_: Any) -> Answer:
        if policy is not None:
            raise KeyboardInterrupt
        return answer(1.0, *[1.0] * (new_tokens - 1))

    monkeypatch.setattr(gpu_bench, "take_turn", lambda *_, **__: turn(10.0, 1.0, 1.0, 1.0))
    monkeypatch.setattr(gpu_compiled, "generate_timed", generate)
    parts = ["--parts", "cells,compiled"]
    with pytest.raises(KeyboardInterrupt):
        gpu.main([*QUICK, *parts, "--contexts", "16", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["complete"] is False
    assert [cell["policy"] for cell in found["cells"]] == list(gpu.MAIN)
    assert [(cell["policy"], cell["context"]) for cell in found["compiled"]] == [
        ("full_context", 16)
    ]


def test_large_numbers_and_notes_fit_the_table() -> None:
    cell = CompiledCell(
        "streamingllm",
        131072,
        "measured",
        "compiled again while measured",
        compile_ms=123456.7,
        prefill_ms=54321.9,
        compiled_decode_ms=(1234.5,),
        decode_allowed=123.45,
        speedup_to_static=12.34,
        speedup_to_uncompiled=45.67,
    )
    failed = CompiledCell("h2o", 8, "failed", "x" * 300)
    both = [attrs.asdict(each) for each in (cell, failed)]
    lines = gpu.table({"cells": [], "compiled": both}).splitlines()
    assert lines[1] == ""
    assert len(lines[2]) == len(lines[4]) <= 80
    assert lines[4].split()[2:] == ["123.5", "54.322", "1234.50", "12.34", "123.45", "45.67"]
    assert (lines[3].split()[:3], len(lines[3])) == (["h2o", "8", "failed:"], 80)
    assert lines[5] == "streamingllm, 131072 tokens: compiled again while measured"
