"""Timing: ratios by hand, turns in rounds, and the clocks around the right calls."""

from typing import Any

import pytest

from kvpolicy.evaluation import Phase, measure_latency
from kvpolicy.evaluation.comparison import latency
from kvpolicy.evaluation.comparison.speed import Speed
from kvpolicy.policies import FastKV, FullContext, SnapKV
from tests.reference import random_tokens, tiny_model


def phase(*wall_ms: float) -> Phase:
    return Phase(wall_ms, tuple(0.0 for _ in wall_ms))


def test_speedup_is_the_median_of_ratios_round_by_round() -> None:
    baseline, policy = phase(10.0, 40.0, 12.0), phase(5.0, 10.0, 8.0)
    assert policy.speedups(baseline) == (2.0, 4.0, 1.5)
    assert policy.speedup(baseline) == 2.0
    assert policy.median_ms == 8.0
    # The ratio of the medians, 12 / 8, would be another number.
    assert policy.speedup(baseline) != baseline.median_ms / policy.median_ms


def test_slower_is_below_one() -> None:
    assert phase(20.0).speedup(phase(10.0)) == 0.5


def test_speedup_needs_the_same_rounds() -> None:
    with pytest.raises(ValueError, match="same rounds, 2, got 1"):
        phase(1.0, 2.0).speedup(phase(1.0))


def test_turns_go_round_and_the_first_round_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", seed=1)
    policies = {"full": FullContext(), "snap": SnapKV()}
    labels = {id(policy): label for label, policy in policies.items()} | {id(None): "none"}
    order: list[str] = []

    def take_turn(model: Any, prompt: Any, policy: Any, new_tokens: int, *_: Any) -> Any:
        order.append(labels[id(policy)])
        count = float(len(order))
        return latency._Turn((count, 10 * count), (100 * count, 1000 * count), None)

    monkeypatch.setattr(latency, "_take_turn", take_turn)
    found = measure_latency(model, [1, 2, 3], policies, rounds=2, new_tokens=5)
    assert order == [
        *("none", "full", "snap"),
        *("full", "snap", "none"),
        *("snap", "none", "full"),
    ]
    assert found.baseline.prefill == Phase((6.0, 8.0), (60.0, 80.0))
    assert found.timings["full"].decode == Phase((400.0, 900.0), (4000.0, 9000.0))
    assert found.timings["snap"].prefill.wall_ms == (5.0, 7.0)


def test_clock_stands_around_prefill_and_around_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that the model moves: 7 s for the prompt, 2 s for each token after it."""
    model = tiny_model("llama", seed=1)
    now = 0.0

    def forward(module: Any, args: Any, kwargs: Any) -> None:
        nonlocal now
        now += 7.0 if args[0].shape[1] == 43 else 2.0

    monkeypatch.setattr(latency.time, "perf_counter", lambda: now)
    monkeypatch.setattr(latency.time, "process_time", lambda: now / 2)
    hook = model.register_forward_pre_hook(forward, with_kwargs=True)
    try:
        found = measure_latency(
            model, random_tokens(0, 43), {"fast": FastKV()}, rounds=1, new_tokens=3
        )
    finally:
        hook.remove()
    for timing in (found.baseline, found.timings["fast"]):
        assert timing.prefill == Phase((7000.0,), (3500.0,))
        assert timing.decode == Phase((2000.0,), (1000.0,))


def test_held_is_what_prefill_left() -> None:
    model = tiny_model("llama", seed=1, num_layers=4, kv_heads=2, hidden_size=48, query_heads=6)
    policies = {"full": FullContext(), "fast": FastKV(retention_tokens=11, tsp_tokens=17)}
    found = measure_latency(model, random_tokens(0, 43), policies, rounds=1, new_tokens=2)
    full, fast = found.timings["full"].held, found.timings["fast"].held
    assert full is not None
    assert fast is not None
    slot = 2 * 2 * 8 * 4  # keys and values, KV heads, head_dim, bytes of a float32
    assert (full.seen, full.kept, full.held_bytes) == (43, 43.0, 4 * 43 * slot)
    assert (fast.seen, fast.kept, fast.held_bytes) == (43, 11.0, 4 * 11 * slot)
    assert fast.full_bytes == full.held_bytes
    assert found.baseline.held is None


def test_no_round_begins_after_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rounds of 10 s each, the first not counted: the one that begins at 20 s is the last."""
    now = 0.0

    def take_turn(*_: Any) -> Any:
        nonlocal now
        now += 10.0
        return latency._Turn((1.0, 1.0), (1.0, 1.0), None)

    monkeypatch.setattr(latency, "_take_turn", take_turn)
    monkeypatch.setattr(latency.time, "perf_counter", lambda: now)
    model = tiny_model("llama", seed=1)

    def rounds(seconds: float | None) -> int:
        nonlocal now
        now = 0.0
        found = measure_latency(model, [1, 2], {}, rounds=4, seconds=seconds)
        return len(found.baseline.prefill.wall_ms)

    assert (rounds(None), rounds(20.0), rounds(19.0), rounds(0.0)) == (4, 2, 1, 1)


def test_unsteady_policies_are_timed_again_with_the_baseline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that varies in its first rounds gets more, and its speeds are round by round."""
    turns: dict[str, int] = {}
    steady, restless = SnapKV(), FastKV()
    labels = {id(None): "none", id(steady): "steady", id(restless): "restless"}

    def take_turn(model: Any, prompt: Any, policy: Any, new_tokens: int, *_: Any) -> Any:
        label = labels[id(policy)]
        number = turns[label] = turns.get(label, 0) + 1
        wall = 20.0 if label == "none" else 10.0
        if label == "restless" and number in (2, 3):
            wall = 40.0
        return latency._Turn((wall, 1.0), (wall, 1.0), None)

    monkeypatch.setattr(latency, "_take_turn", take_turn)
    model = tiny_model("llama", seed=1)
    policies = {"steady": steady, "restless": restless}
    found = measure_latency(model, [1, 2], policies, rounds=5, again=9)
    # Of n rounds with two slow ones, the interval leaves out both from the eleventh on.
    assert turns == {"none": 12, "steady": 6, "restless": 12}
    assert found.timings["steady"].prefill.rounds == (0, 1, 2, 3, 4)
    speed = found.timings["restless"].prefill.speed(found.baseline.prefill)
    assert speed.rounds == (0.5, 0.5, *[2.0] * 9)
    assert speed.steady
    turns.clear()
    measure_latency(model, [1, 2], policies, rounds=5, again=2)
    assert turns["restless"] == 8
    turns.clear()
    measure_latency(model, [1, 2], policies, rounds=2, again=2)
    assert turns["restless"] == 3


def test_processor_time_stands_for_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", seed=1)
    turn = latency._Turn((8.0, 3.0), (2.0, 1.0), None)
    monkeypatch.setattr(latency, "_take_turn", lambda *_: turn)
    found = measure_latency(model, [1, 2], {}, rounds=1, processor_time=True)
    assert found.baseline.prefill == Phase((3.0,), (3.0,))
    assert found.baseline.decode == Phase((1.0,), (1.0,))


def test_interval_of_the_median_by_hand() -> None:
    """Nine rounds leave out one at each end: 1 - 2 (1 + 9) / 2**9 is 96%, one more 82%."""
    nine = Speed((9.0, 1.0, 8.0, 2.0, 7.0, 3.0, 6.0, 4.0, 5.0))
    assert (nine.median, nine.interval) == (5.0, (2.0, 8.0))
    assert Speed((3.0, 1.0, 2.0, 5.0, 4.0)).interval == (1.0, 5.0)
    assert Speed((1.0,) * 4).interval is None
    assert [Speed((1.0,) * count).steady for count in (1, 4, 5, 9)] == [False, False, True, True]
    assert Speed((0.9, 1.0, 1.0, 1.0, 1.09)).steady
    assert not Speed((0.9, 1.0, 1.0, 1.0, 1.11)).steady
    with pytest.raises(ValueError, match="rounds"):
        Speed(())


@pytest.mark.parametrize("bad", [{"rounds": 0}, {"new_tokens": 0}])
def test_bad_counts(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        measure_latency(tiny_model("llama", seed=1), [1, 2], {}, **bad)
