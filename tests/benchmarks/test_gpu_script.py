"""The GPU benchmark on a tiny model and the CPU: its file, its order, and what may go wrong."""

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from typing import Any

import attrs
import pytest
import torch

from benchmarks import gpu, gpu_cells
from benchmarks.gpu_cells import FULL, Bench, Cell, Job, Settings, ratios
from benchmarks.timing import Answer, Deadline, Interval, OutOfTimeError, TimedPolicy, Turn
from kvpolicy import CachePolicy

QUICK = ["--quick", "--threads", "1"]
JOBS = gpu.jobs_of([256, 512])
ON_GPU_ONLY = {"before_bytes", "prefill_peak_bytes", "decode_peak_bytes"}
OF_LOOPS_ONLY = {"rehearsal_ms", "held_bytes", "masked_layers_prefill", "masked_layers_decode"}
OF_POLICIES_ONLY = {"scoring_ms", "scoring_prefill_ms", "scoring_share"}
OF_COMPILED_ONLY = {"compile_ms", "compiled_graphs"}
SPEEDUPS = ("prefill", "decode", "mean", "generate", "loop")


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quick")
    gpu.main([*QUICK, "--out", str(folder)])
    return folder


@pytest.fixture(scope="module")
def record(quick: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((quick / "gpu.json").read_text())
    return found


def test_cells_come_by_importance_and_have_what_was_measured(record: dict[str, Any]) -> None:
    fields = [each.name for each in attrs.fields(Cell)]
    for part in gpu.PARTS:
        jobs = [job for job in JOBS if job.part == part]
        assert all(map(Job.is_of, jobs, record[part]))
        for job, cell in zip(jobs, record[part], strict=True):
            assert list(cell) == [*fields, *(f"{each}_speedup" for each in SPEEDUPS)]
            assert cell["status"] == "measured"
            absent = set(ON_GPU_ONLY)
            if part != "cells" or job.policy in (FULL, "full_chunks"):
                absent |= OF_POLICIES_ONLY
            if part != "cells":
                absent |= OF_LOOPS_ONLY
            if part != "compiled":
                absent |= OF_COMPILED_ONLY
            if job.context == 4 * 512:  # too many tokens for full context
                absent |= {f"{each}_speedup" for each in SPEEDUPS}
            assert {name for name in cell if cell[name] is None} == absent
            assert len(cell["prefill_ms"]) == (3 if part == "cells" else 1)
            assert len(cell["decode_ms"]) == 3  # of 4 tokens the prefill gives the first
            assert min(*cell["prefill_ms"], *cell["decode_ms"]) > 0
            assert cell["prefill_device_ms"] == cell["decode_device_ms"] == []
            if part == "compiled":
                assert (cell["note"], cell["compiled_graphs"]) == ("", 1)
                # Compiling was in the warm-up, and nothing of it in the tokens that count.
                assert sum(cell["decode_ms"]) < cell["compile_ms"]


def test_ratios_are_to_full_context_of_the_same_kind(record: dict[str, Any]) -> None:
    for part in gpu.PARTS:
        for row in record[part]:
            place = {key: row[key] for key in ("context", "buffers", "batch")}
            full = [each for each in record[part] if {**each, **place, "policy": FULL} == each]
            if not full:
                assert (row["context"], row["prefill_speedup"]) == (4 * 512, None)
                continue
            for phase in ("prefill", "decode"):
                ratio = median(full[0][f"{phase}_ms"]) / median(row[f"{phase}_ms"])
                assert row[f"{phase}_speedup"] == pytest.approx(ratio)
            mean = fmean(full[0]["decode_ms"]) / fmean(row["decode_ms"])
            assert row["mean_speedup"] == pytest.approx(mean)
            loop = [each for each in record["cells"] if each["context"] == row["context"]]
            token = median(loop[0]["decode_ms"]) / median(row["decode_ms"])
            assert row["loop_speedup"] == pytest.approx(token)


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
    assert 51 <= held["replaykv", 512] < 60  # heads hold what they choose, and are padded
    for cell in record["cells"]:  # none: sdpa is free to take its flash kernel
        assert cell["masked_layers_decode"] == 0 or cell["policy"].startswith("replaykv")
        if cell["policy"] != "full_chunks":  # Transformers makes one for all chunks but the first
            assert cell["masked_layers_prefill"] == 0


def test_scoring_is_part_of_its_prefill(record: dict[str, Any]) -> None:
    scored = [cell for cell in record["cells"] if cell["scoring_ms"] is not None]
    assert len(scored) > 10
    for cell in scored:
        decides = cell["policy"] != "everything"  # nothing is asked where all is kept
        assert 0 <= cell["scoring_ms"] < cell["scoring_prefill_ms"]
        assert (cell["scoring_ms"] > 0) is decides
        share = cell["scoring_ms"] / cell["scoring_prefill_ms"]
        assert cell["scoring_share"] == pytest.approx(share)


def test_tables_have_a_line_for_each_cell_and_fit(
    quick: Path, record: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    gpu.main([*QUICK, "--show", str(quick / "gpu.json")])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    tables = [each.splitlines() for each in shown.strip("\n").split("\n\n")]
    assert [table[0].split()[0] for table in tables] == [*gpu.PARTS, "x:"]
    for part, table in zip(gpu.PARTS, tables, strict=False):
        lines = [line.split() for line in table[1:] if "masks" not in line]
        assert [(line[0], int(line[1])) for line in lines] == sorted(
            ((row["policy"], row["context"]) for row in record[part]), key=lambda row: row[1]
        )
    assert json.loads((quick / "gpu.json").read_text()) == record  # showing measures nothing
    assert (quick / "gpu.png").read_bytes().startswith(b"\x89PNG")


# What a cell is made of, on turns made by hand.

Take = Callable[..., Turn]


def turn(prefill_ms: float, *decode_ms: float) -> Turn:
    intervals = [Interval(ms, 0.0, ms / 2) for ms in (prefill_ms, *decode_ms)]
    return Turn(intervals[0], tuple(intervals[1:]), 77, (1, 20, 30))


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
    generate: Callable[..., Answer] = gpu_cells.generate_timed,
    seconds: float = 1e9,
    clock: Clock | None = None,
    **settings: Any,
) -> Bench:
    """A bench over the tiny model whose turns are ``take``'s, and its answers ``generate``'s."""
    clock = Clock() if clock is None else clock
    monkeypatch.setattr(gpu_cells, "take_turn", take)
    monkeypatch.setattr(gpu_cells, "generate_timed", generate)
    spec, _ = gpu.PRESETS["tiny"]
    deadline = Deadline(seconds, clock)
    return Bench(spec.build(), gpu.plans_for(spec), Settings(**settings), deadline, clock)


def run(bench: Bench, *cells: tuple[str, int]) -> list[Cell]:
    return [bench.run(Job("cells", *cell)) for cell in cells]


def test_a_cell_is_warmed_up_rehearsed_repeated_and_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[int, int, bool, bool]] = []

    def take(model: Any, prompt: Any, policy: Any, new_tokens: int, **rest: Any) -> Turn:
        scored, watched = isinstance(policy, TimedPolicy), rest.get("count_masks", False)
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
    assert found[0].scoring_prefill_ms == 105.0
    assert (found[0].before_bytes, found[0].prefill_peak_bytes) == (1, 20)
    assert (found[0].decode_peak_bytes, found[0].held_bytes) == (30, 77)


@pytest.mark.parametrize(
    ("seconds", "prefills"), [(0.1, 3), (10.0, 3), (13.0, 2), (29.0, 1), (500.0, 1)]
)
def test_prefills_fit_the_seconds_of_a_cell(
    monkeypatch: pytest.MonkeyPatch, seconds: float, prefills: int
) -> None:
    """Of a prompt that takes longer than that, the rehearsal counts and nothing else is run."""
    taken: list[int] = []

    def take(model: Any, prompt: Any, policy: Any, new_tokens: int, **_: Any) -> Turn:
        taken.append(new_tokens)
        return turn(1e3 * seconds, *[1.0] * (new_tokens - 1))

    (cell,) = run(bench(monkeypatch, take, new_tokens=3, cell_seconds=30.0), ("snapkv", 8))
    assert cell.prefill_ms == (1e3 * seconds,) * prefills
    once = seconds > 30
    assert taken == [4, 3, *([] if once else [3, *[1] * (prefills - 1), 1])]
    assert (cell.note, cell.rehearsal_ms is None) == ("the rehearsal only" if once else "", once)


def test_speedups_are_full_context_over_the_policy() -> None:
    def row(policy: str, prefill: tuple[float, ...], decode: tuple[float, ...]) -> dict[str, Any]:
        cell = Cell(policy, 8, "", 1, "measured", prefill_ms=prefill, decode_ms=decode)
        return attrs.asdict(cell)

    record = {"cells": [row(FULL, (8.0, 9.0, 99.0), (4.0, 4.0))]}
    found = ratios(row("fastkv", (6.0, 3.0), (1.0, 2.0)), "cells", record)
    assert (found["prefill_speedup"], found["decode_speedup"]) == (2.0, 4.0 / 1.5)
    assert found["generate_speedup"] == 17.0 / 7.5
    # Fewer tokens were decoded: the whole cannot be compared, a token can.
    shorter = ratios(row("fastkv", (6.0, 3.0), (1.0,)), "cells", record)
    assert (shorter["decode_speedup"], shorter["generate_speedup"]) == (4.0, None)
    for nothing in (
        ratios(row("h2o", (), ()), "cells", record),
        ratios(row("h2o", (1.0,), (1.0,)), "cells", {"cells": []}),
    ):
        assert set(nothing.values()) == {None}


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
    assert found[0].note == "CUDA out of memory. Tried"


def test_a_failure_costs_one_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(model: Any, prompt: Any, policy: Any, *_: Any, **__: Any) -> Turn:
        if policy is None:
            raise RuntimeError("no kernel image")
        return turn(10.0, 1.0)

    found = run(bench(monkeypatch, take), ("full_context", 16), ("snapkv", 16))
    assert (found[0].status, found[1].status) == ("failed", "measured")
    assert found[0].note.startswith("RuntimeError: no kernel image (take:")


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


def test_masks_are_told_of_since_they_cost_sdpa_its_flash_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def take(*_: Any, **rest: Any) -> Turn:
        return attrs.evolve(turn(10.0), masks=(32, 4) if "count_masks" in rest else None)

    (cell,) = run(bench(monkeypatch, take, new_tokens=9), ("snapkv", 16))
    assert (cell.masked_layers_prefill, cell.masked_layers_decode) == (32, 4)
    assert cell.note == "time ended 8 tokens early; attention masks in 36 layers"
    row = attrs.asdict(cell)
    lines = gpu.table({"cells": [row | ratios(row, "cells", {"cells": []})]}).splitlines()
    assert lines[2] == f"snapkv, 16 tokens: {cell.note}"
    assert max(map(len, lines)) <= 80


def test_time_that_ends_in_the_first_prefill_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real model: the clock jumps inside its first layer, whose successor is late."""
    clock = Clock()
    subject = bench(monkeypatch, gpu_cells.take_turn, seconds=100.0, clock=clock)
    layers = subject.model.get_decoder().layers

    def jump(*_: Any) -> None:
        clock.now += 150.0

    with layers[0].self_attn.register_forward_pre_hook(jump):
        cells = run(subject, ("fastkv", 64))
    assert [cell.status for cell in cells] == ["out of time"]
    assert cells[0].note == "no prefill done after 150 s"
    assert not any(layer._forward_pre_hooks for layer in layers)


# Compiled answers, made by hand.


def answer(prefill_ms: float, *decode_ms: float) -> Answer:
    return Answer(torch.zeros(1, 1 + len(decode_ms)), prefill_ms, decode_ms, 77)


def run_compiled(bench: Bench, name: str) -> Cell:
    return bench.run(Job("compiled", name, 16, "compiled"))


def compiled(monkeypatch: pytest.MonkeyPatch, *graphs: int, skips: int = 0) -> None:
    """What is compiled before, after the warm-up, and after what is measured."""
    readings = iter([(count, skips if count else 0) for count in graphs])
    monkeypatch.setattr(gpu_cells, "compilations", lambda: next(readings))


def test_a_compiled_cell_is_warmed_up_and_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[int, int, int]] = []

    def generate(model: Any, prompt: Any, policy: Any, new_tokens: int, **how: Any) -> Answer:
        taken.append((prompt.shape[1], new_tokens, how["room"]))
        slow = 1000.0 if new_tokens == 5 else 3.0  # compiling
        return answer(20.0, slow, *[2.0] * (new_tokens - 2))

    subject = bench(monkeypatch, gpu_cells.take_turn, generate=generate, new_tokens=9)
    compiled(monkeypatch, 0, 1, 1)
    cell = run_compiled(subject, "fastkv")
    assert taken == [(16, 5, 9), (16, 9, 9)]
    assert (cell.status, cell.note, cell.compiled_graphs) == ("measured", "", 1)
    assert (cell.compile_ms, cell.decode_ms) == (1006.0, (3.0, *(2.0,) * 7))
    assert (cell.prefill_ms, cell.prefill_peak_bytes) == ((20.0,), 77)


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
    generate = lambda *_, **__: answer(1.0, 1.0)  # noqa: E731
    subject = bench(monkeypatch, gpu_cells.take_turn, generate=generate, new_tokens=2)
    compiled(monkeypatch, *graphs, skips=skips)
    cell = run_compiled(subject, "snapkv")
    assert (cell.note, cell.compiled_graphs) == (note, graphs[1] - graphs[0])


@pytest.mark.parametrize("at", ["warm-up", "prefill", "first token"])
def test_time_that_ends_before_a_compiled_token_counts(
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

    subject = bench(monkeypatch, gpu_cells.take_turn, generate=generate, clock=clock)
    cell = run_compiled(subject, "snapkv")
    seconds = 15 if at == "warm-up" else 30
    assert (cell.status, cell.note) == (
        *("out of time", f"no compiled token timed after {seconds} s"),
    )


# The file, and starts that go on where another ended.

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
    monkeypatch.setattr(gpu_cells, "take_turn", killed_in("snapkv", taken))
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path)
    first = json.loads((tmp_path / "gpu.json").read_text())
    assert first["unfinished"] == {"cells/snapkv/16/1": 1}
    assert [cell["policy"] for cell in first["cells"]] == ["full_context"]
    assert first["complete"] is False
    taken.clear()
    monkeypatch.setattr(gpu_cells, "take_turn", killed_in(None, taken))
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
    """The first start runs out of time in full context, and has the policy, which is faster."""
    clock, slow = Clock(), True
    monkeypatch.setattr(gpu.time, "monotonic", clock)

    def take(model: Any, prompt: Any, policy: Any, new_tokens: int, **how: Any) -> Turn:
        seconds = 10.0 if policy is None else 1.0
        clock.now += 200.0 if slow and policy is None else 0.0
        how["deadline"].check()
        return turn(1e3 * seconds, *[seconds] * (new_tokens - 1))

    monkeypatch.setattr(gpu_cells, "take_turn", take)
    first = start(tmp_path)
    assert [row["status"] for row in first["cells"]] == ["out of time", "measured"]
    first["unfinished"] = {"cells/full_context/16/1": 1}
    (tmp_path / "gpu.json").write_text(json.dumps(first))
    slow = False
    second = start(tmp_path)
    assert second["complete"] is True
    assert {row["policy"]: row["prefill_speedup"] for row in second["cells"]} == {
        "full_context": 1.0,
        "snapkv": 10.0,
    }


def test_a_cell_that_is_killed_twice_has_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    taken: list[str] = []
    monkeypatch.setattr(gpu_cells, "take_turn", killed_in("full_context", taken))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            start(tmp_path)
    third = start(tmp_path)
    assert [cell["status"] for cell in third["cells"]] == ["failed", "measured"]
    assert third["cells"][0]["note"] == "the process ended in it 2 times"
    assert (third["complete"], third["unfinished"]) == (True, {})
    assert list(third["cells"][0]) == list(third["cells"][1])


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

    monkeypatch.setattr(gpu_cells, "take_turn", take)
    found = start(tmp_path)
    assert [cell["status"] for cell in found["cells"]] == ["out of time", "measured"]
    assert found["complete"] is True
    assert Settings().limit_of(524288) == 4 * Settings().limit_of(131072) == 480.0


def test_other_settings_are_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_cells, "take_turn", lambda *_, **__: turn(10.0, 1.0, 1.0, 1.0))
    before = start(tmp_path)
    with pytest.raises(ValueError, match="of other settings.*differs in new_tokens.*--again"):
        start(tmp_path, "--new-tokens", "7")
    assert json.loads((tmp_path / "gpu.json").read_text()) == before
    assert start(tmp_path, "--new-tokens", "7", "--again")["settings"]["new_tokens"] == 7


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
    assert {job.policy for job in jobs} == set(gpu.plans_for(gpu.LLAMA))
    assert {job.batch for job in jobs} == {1, 8}
    assert {job.context for job in jobs if job.policy == "fastkv_chunks"} == {131072, 524288}


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


def test_a_gpu_is_asked_for_before_anything_is_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "needs a GPU that torch can see" in capsys.readouterr().err
