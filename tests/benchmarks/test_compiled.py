"""Decoding that `generate` compiles: its tokens, its clock and its deadline."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from benchmarks import clocks, compiled, gpu
from benchmarks.clocks import Deadline, OutOfTimeError
from benchmarks.compiled import Compilations, TokenClock, generate_timed
from kvpolicy.integrations.transformers import PolicyCache
from tests.benchmarks.test_turns import layer_hooks, prompt
from tests.reference import tiny_model

POLICIES = {name: plan.policy for name, plan in gpu.plans_for(gpu.TINY).items()}
CPU = torch.device("cpu")


@pytest.fixture
def model() -> Iterator[PreTrainedModel]:
    with compiled.fresh_compiler():
        yield tiny_model("llama", seed=1, num_layers=4)


@pytest.mark.parametrize("name", ["full_context", "fastkv", "snapkv", "gemfilter"])
def test_tokens_are_those_of_an_uncompiled_generate(model: PreTrainedModel, name: str) -> None:
    policy, given = POLICIES[name], prompt(43)
    before = Compilations.so_far()
    warm_up = generate_timed(model, given, policy, 5, room=9)
    warm = Compilations.so_far()
    answer = generate_timed(model, given, policy, 9, room=9)
    assert warm.since(before).graphs == 1  # the prompt is not compiled, nor what is seen twice
    assert Compilations.so_far() == warm
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
    monkeypatch.setattr(clocks.time, "perf_counter", read)
    clock = TokenClock(torch.device("cuda"), None, lambda: log.append("prefill over"))
    for value in ([[7, 8, 9]], [1], [2], [3]):
        clock.put(torch.tensor(value))
    assert clock.steps_ms() == [7000.0, 1000.0, 2000.0]
    assert [int(token) for token in clock.tokens] == [1, 2, 3]
    waited = ["wait", "read"]
    assert log == [*waited, *waited, "prefill over", *waited, *waited]


def test_a_deadline_is_asked_by_layers_of_the_prompt_and_by_tokens(model: PreTrainedModel) -> None:
    asked = count()
    deadline = Deadline(1e9, lambda: float(next(asked)))
    generate_timed(model, prompt(43), None, 6, room=6, deadline=deadline)
    assert next(asked) == 1 + (1 + 4 + 6)  # when made; the prompt's start, 4 layers, 6 tokens
    assert layer_hooks(model) == 0


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
    assert compiled.compile_config(torch.device("cuda")) is None
    config = compiled.compile_config(CPU)
    assert config is not None
    assert (config.backend, config._compile_all_devices) == ("eager", True)
