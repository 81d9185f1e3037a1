"""The benchmark of what a policy adds: its counters against known counts, and its tables."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from benchmarks import overhead
from benchmarks.common import BASELINE, random_prompt


class AddingCache(DynamicCache):
    """A cache that adds two tensors more in every layer."""

    def update(self, keys: torch.Tensor, *rest: Any, **how: Any) -> Any:
        torch.add(keys, keys)
        return super().update(keys, *rest, **how)


def dynamic(model: PreTrainedModel) -> Cache:
    return DynamicCache(config=model.config)


def adding(model: PreTrainedModel) -> Cache:
    return AddingCache(config=model.config)


@pytest.mark.parametrize("kind", list(overhead.COUNTERS))
@pytest.mark.parametrize(("make", "more"), [(dynamic, 0.0), (adding, 1.0)])
def test_counts_of_a_cache_that_is_known(kind: str, make: Any, more: float) -> None:
    """One operator more in every layer; and one Python function more, which calls the other."""
    base, own = (
        overhead.layer_counts(dict.fromkeys(overhead.SIZES, each), 32, 4, kind)
        for each in (dynamic, make)
    )
    assert {key: own[key] - base[key] for key in own} == dict.fromkeys(
        ["prompt", "loop", "token", "mean"], more
    )
    # A forward of Llama alone: seven projections in every layer.
    assert all(count > 7 for count in base.values())


def test_counters_count_what_runs_while_they_are_open() -> None:
    ones = torch.ones(2)

    def twice() -> None:
        torch.add(ones, ones)
        torch.mul(ones, ones)

    for kind, before in (("operators", 2), ("calls", 1)):
        with overhead.COUNTERS[kind]() as counter:
            twice()
        counted = counter.count
        twice()
        # Of Python's calls, closing the counter is one as well.
        assert counted == counter.count == before + (kind == "calls")


def test_readings_of_generate_leave_out_the_prompt_and_the_first_token() -> None:
    model = overhead.TINY.build()
    cache, forwards = DynamicCache(config=model.config), 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    with model.register_forward_pre_hook(count):
        prompt = random_prompt(97, 16)
        found = overhead.generate(model, prompt, cache, 5, lambda: forwards**2)
    # The prompt is the first forward, and the second is left out.
    assert found == [9 - 4, 16 - 9, 25 - 16, 36 - 25, 49 - 36]
    assert cache.get_seq_length() == 16 + 6


def test_ratios_say_cost_of_tokens_and_speed_of_prompts() -> None:
    turns = {BASELINE: lambda: {"ms": 2.0}, "SnapKV": lambda: {"ms": 4.0, "attach_ms": 1.0}}
    cost = overhead.time_rows({"model": "x"}, turns, 2, speed=False)
    assert [row["ratio"]["median"] for row in cost] == [1.0, 2.0]
    speed = overhead.time_rows({"model": "x"}, turns, 2, speed=True)
    assert [row["ratio"]["median"] for row in speed] == [1.0, 0.5]
    assert speed[1] == {**cost[1], "ratio": speed[1]["ratio"]}
    assert speed[1]["attach_ms"] == [1.0, 1.0]


def test_only_the_processors_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that waits costs nothing."""
    model, prompt = overhead.TINY.build(), random_prompt(97, 1024)
    wait = model.register_forward_pre_hook(lambda *_: time.sleep(0.4))
    start = time.perf_counter()
    with wait:
        found = overhead.prompt_ms(model, dynamic, prompt)
    assert found["ms"] + found["attach_ms"] < 1e3 * (time.perf_counter() - start) - 300


def test_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["SnapKV", overhead.BOUNDED]
    overhead.main(["--quick", f"--policies={','.join(few)}", f"--out={tmp_path}"])
    shown = capsys.readouterr().out
    record = json.loads((tmp_path / "overhead.json").read_text())
    for part in ("tokens", "prompts"):
        assert [row["policy"] for row in record[part]] == [BASELINE, *few]
        assert all(len(row["ms"]) == 1 and row["ms"][0] > 0 for row in record[part])
    assert [row["wanted"] for row in record["tokens"]] == [None, 1.03, 1.15]
    for part in overhead.COUNTERS:
        base, snap = record[part]
        assert base["prompt_added"] is None
        assert snap["prompt_added"] == snap["prompt"] - base["prompt"] > 20
    overhead.main(["--show", str(tmp_path / "overhead.json")])
    assert capsys.readouterr().out == shown
    assert max(map(len, shown.splitlines())) <= 80


def test_large_numbers_fit_the_tables() -> None:
    ratio = {"median": 12.0345, "lowest": 10.9, "highest": 13.4567}
    row = {"policy": "SnapKV bounded", "model": "arithmetic", "context": 2048, "ratio": ratio}
    row |= {"ms": [2586.681], "wanted": 0.85, "attach_ms": [123.456]}
    line = overhead.BENCHMARK.tables[3].line(row)  # type: ignore[union-attr]
    assert len(line) <= 80
    assert line.split()[2:] == [
        *("arithmetic", "2048", "2586.68", "12.034", "(10.900-13.457)", "0.85", "123.46")
    ]
