"""Clocks, bytes, masks and deadlines by hand; tokens as without what is measured."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from benchmarks import timing
from benchmarks.timing import (
    Deadline,
    Interval,
    OutOfTimeError,
    TimedPolicy,
    compilations,
    generate_timed,
    take_turn,
    timed,
)
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import FastKV, GemFilter, SnapKV
from tests.reference import random_tokens, tiny_model

CPU = torch.device("cpu")


def prompt(length: int) -> torch.Tensor:
    return torch.tensor([random_tokens(0, length)])


def layer_hooks(model: Any) -> int:
    return sum(len(layer._forward_pre_hooks) for layer in model.get_decoder().layers)


@pytest.mark.parametrize("policy", [None, FastKV(), GemFilter()])
def test_clock_stands_around_prefill_and_around_each_token(
    monkeypatch: pytest.MonkeyPatch, policy: Any
) -> None:
    """With a clock that the model moves: 7 s for the prompt, 1, 2, 3 s for the tokens after it."""
    model = tiny_model("llama", seed=1)
    now, calls = 0.0, 0

    def forward(module: Any, args: Any, kwargs: Any) -> None:
        nonlocal now, calls
        now += 7.0 if args[0].shape[1] == 43 else float(calls)
        calls += 1

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    monkeypatch.setattr(timing.time, "process_time", lambda: 2 * now)
    with model.register_forward_pre_hook(forward, with_kwargs=True):
        turn = take_turn(model, prompt(43), policy, 4)
    assert turn.prefill == Interval(7000.0, 14000.0)
    assert turn.decode == tuple(Interval(1e3 * step, 2e3 * step) for step in (1, 2, 3))
    assert turn.memory is None


def test_held_bytes_are_those_after_prefill() -> None:
    model = tiny_model("llama", seed=1, num_layers=5)
    slot = 2 * 2 * 8 * 4  # keys and values, KV heads, head_dim, bytes of a float32
    assert take_turn(model, prompt(43), None, 3).held_bytes == 5 * 43 * slot
    assert take_turn(model, prompt(43), SnapKV(retention_tokens=11), 3).held_bytes == 5 * 11 * slot


@pytest.mark.parametrize(("implementation", "prefill", "decode"), [("sdpa", 0, 0), ("eager", 1, 0)])
def test_masks_are_counted_layer_by_layer(implementation: str, prefill: int, decode: int) -> None:
    """Eager attention needs a mask in every layer, sdpa none.

    Layers 1 and 3 of the 4 run for some of their tokens, and layer 2 behind the drop in blocks,
    with masks of their own that are made inside.
    """
    model = tiny_model("llama", seed=1, num_layers=4, attn_implementation=implementation)
    turn = take_turn(model, prompt(43), FastKV(tsp_layer=1, tsp_rate=0.5), 3, count_masks=True)
    assert turn.masks == (prefill, decode)


def test_masks_of_both_passes_of_a_restart_are_counted() -> None:
    model = tiny_model("llama", seed=1, num_layers=4, attn_implementation="eager")
    turn = take_turn(model, prompt(43), GemFilter(filter_layer=2), 1, count_masks=True)
    assert turn.masks == (3 + 3, 0)  # up to the filter layer, then all but the last


@pytest.mark.parametrize(
    ("policy", "calls"),
    # FastKV's dropping layer is called twice: until it is seen what goes on, then for that.
    [(None, [0, 1]), (FastKV(), [0, 1, 1]), (GemFilter(), [0, 1])],
)
def test_deadline_ends_a_prefill_between_layers(policy: Any, calls: list[int]) -> None:
    model = tiny_model("llama", seed=1, num_layers=4)
    asked = iter(range(100))
    deadline = Deadline(2.5, lambda: float(next(asked)))  # from 0 to 2.5: the third layer is late
    reached: list[int] = []
    for index, layer in enumerate(model.get_decoder().layers):
        layer.self_attn.register_forward_pre_hook(lambda *_, index=index: reached.append(index))
    with pytest.raises(OutOfTimeError):
        take_turn(model, prompt(43), policy, 4, deadline=deadline)
    assert reached == calls
    assert layer_hooks(model) == 0
    assert take_turn(model, prompt(43), policy, 4).decode  # the model is as it was


def test_deadline_ends_decoding_between_tokens() -> None:
    model = tiny_model("llama", seed=1, num_layers=4)
    asked = iter(range(100))
    deadline = Deadline(6.5, lambda: float(next(asked)))  # 4 layers, then tokens at 5, 6, 7
    assert len(take_turn(model, prompt(43), SnapKV(), 50, deadline=deadline).decode) == 2


def test_timed_policy_decides_as_the_policy_does_and_times_each_decision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("llama", seed=1, num_layers=4)
    plain = FastKV(tsp_layer=1, retention_tokens=11, tsp_tokens=17)
    ticks = iter(range(100))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(ticks)))
    policy = TimedPolicy(plain, CPU)
    kept = []
    for each in (plain, policy):
        cache = PolicyCache(each)
        with cache.attached(model), torch.inference_mode():
            model(prompt(43), cache=cache)
        kept.append([layer.positions.tolist() for layer in cache.layers])
    assert kept[0] == kept[1]
    assert policy.total_ms() == 4 * 1000.0  # one tick inside each layer's decision


def test_timed_policy_times_the_choice_of_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", seed=1, num_layers=4)
    ticks = iter(range(100))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(ticks)))
    policy = TimedPolicy(GemFilter(), CPU)
    cache = PolicyCache(policy)
    with cache.attached(model), torch.inference_mode():
        model(prompt(43), cache=cache)
    assert policy.total_ms() == 1000.0  # the choice; layers that keep all are not asked


class FakeEvent:
    """A CUDA event on a device whose clock is the length of a log."""

    log: list[str]

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = len(self.log)
        self.log.append("event")

    def elapsed_time(self, end: "FakeEvent") -> float:
        return float(end.at - self.at)


@pytest.fixture
def cuda_log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of a device that is not there."""
    log: list[str] = []
    monkeypatch.setattr(FakeEvent, "log", log, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("wait"))
    return log


def test_a_gpu_is_waited_for_before_both_readings_of_the_clock(
    cuda_log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(len(cuda_log)))
    monkeypatch.setattr(timing.time, "process_time", lambda: 0.0)
    result, interval = timed(torch.device("cuda"), lambda: cuda_log.append("run"))
    assert result is None
    assert cuda_log == ["wait", "event", "run", "event", "wait"]
    assert interval == Interval(4e3, 0.0, 2.0)  # on the clock all but the first, on the device two


def test_decisions_on_a_gpu_are_timed_by_events_without_waiting(cuda_log: list[str]) -> None:
    model = tiny_model("llama", seed=1, num_layers=4)
    policy = TimedPolicy(FastKV(), torch.device("cuda"))
    cache = PolicyCache(policy)
    with cache.attached(model), torch.inference_mode():
        model(prompt(43), cache=cache)
    assert cuda_log == ["event"] * 8
    assert policy.total_ms() == 4.0


def test_memory_of_a_gpu_is_the_peak_of_each_phase(
    cuda_log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks = iter([2000, 300])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(peaks))
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda device: cuda_log.append("forget")
    )
    model = tiny_model("llama", seed=1)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    turn = take_turn(model, prompt(43), None, 2)
    assert turn.memory == (100, 2000, 300)
    phase = ["wait", "forget", "wait", "event", "event", "wait"]
    assert cuda_log == phase + phase
    assert turn.prefill.device_ms == 1.0


# Answers of `generate`.

POLICIES: dict[str, Any] = {
    "full_context": None,
    "fastkv": FastKV(tsp_rate=0.2, retention_rate=0.1),
    "snapkv": SnapKV(0.1),
    "gemfilter": GemFilter(retention_rate=0.1),
}


@pytest.fixture
def model() -> Iterator[PreTrainedModel]:
    with timing.fresh_compiler():
        yield tiny_model("llama", seed=1, num_layers=4)


@pytest.mark.parametrize("name", ["full_context", "fastkv", "snapkv", "gemfilter"])
def test_tokens_are_those_of_an_uncompiled_generate(model: PreTrainedModel, name: str) -> None:
    policy, given = POLICIES[name], prompt(43)
    before, _ = compilations()
    warm_up = generate_timed(model, given, policy, 5, room=9)
    warm, _ = compilations()
    answer = generate_timed(model, given, policy, 9, room=9)
    assert warm - before == 1  # the prompt is not compiled, nor what is seen twice
    assert compilations()[0] == warm
    cache: Any = DynamicCache(config=model.config) if policy is None else PolicyCache(policy)
    plain = model.generate(given, cache=cache, max_new_tokens=9, do_sample=False)
    assert len(answer.tokens.unique()) > 2
    assert torch.equal(answer.tokens, plain[:, 43:])
    assert torch.equal(warm_up.tokens, plain[:, 43:48])
    assert (len(warm_up.decode_ms), len(answer.decode_ms)) == (4, 8)
    assert answer.peak_bytes is None


def test_a_token_is_from_one_reading_of_the_clock_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    readings = iter([3.0, 10.0, 11.0, 13.0])

    def read() -> float:
        log.append("read")
        return next(readings)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("wait"))
    monkeypatch.setattr(timing.time, "perf_counter", read)
    clock = timing._TokenClock(torch.device("cuda"), None, lambda: log.append("prefill over"))
    for value in ([[7, 8, 9]], [1], [2], [3]):
        clock.put(torch.tensor(value))
    assert clock.steps() == [7.0, 1.0, 2.0]
    assert [int(token) for token in clock.tokens] == [1, 2, 3]
    waited = ["wait", "read"]
    assert log == [*waited, *waited, "prefill over", *waited, *waited]


@pytest.mark.parametrize("name", ["full_context", "fastkv"])
def test_a_deadline_ends_a_prefill(model: PreTrainedModel, name: str) -> None:
    asked = iter(range(100))
    deadline = Deadline(3.5, lambda: float(next(asked)))  # the prompt's start and two layers
    with pytest.raises(OutOfTimeError):
        generate_timed(model, prompt(43), POLICIES[name], 6, room=6, deadline=deadline)
    assert layer_hooks(model) == 0
    assert generate_timed(model, prompt(43), POLICIES[name], 6, room=6).tokens.shape == (1, 6)


def test_a_deadline_ends_decoding_between_tokens(model: PreTrainedModel) -> None:
    asked = iter(range(100))
    deadline = Deadline(7.5, lambda: float(next(asked)))  # start, 4 layers, then tokens at 6, 7, 8
    answer = generate_timed(model, prompt(43), None, 50, room=50, deadline=deadline)
    assert (answer.tokens.shape, len(answer.decode_ms)) == ((1, 3), 2)


def test_on_a_gpu_generate_is_told_nothing_of_compiling() -> None:
    assert timing.compile_config(torch.device("cuda")) is None
    config = timing.compile_config(CPU)
    assert config is not None
    assert (config.backend, config._compile_all_devices) == ("eager", True)
