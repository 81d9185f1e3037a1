"""Bounded answers in buffers of a fixed size, compiled or not, against growing ones."""

import copy
import gc
import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.forward import static_decoding
from kvpolicy.integrations.transformers.forward.decoding import static_rolling
from kvpolicy.integrations.transformers.forward.decoding.choosing import Selection
from kvpolicy.integrations.transformers.state.layer import PolicyLayer
from kvpolicy.policies import (
    H2O,
    RKV,
    TOVA,
    AdaKV,
    CriticalKV,
    ExpectedAttention,
    KeyDiff,
    ReplayKV,
    SnapKV,
    StreamingLLM,
)
from tests.integrations.decoding.reading import held
from tests.integrations.decoding.rules import bounded
from tests.integrations.decoding.test_state import go_on
from tests.integrations.forward.test_static import Counting, assert_same, everywhere, generate
from tests.integrations.model.test_families import model_of
from tests.integrations.test_generation import assert_same_state
from tests.integrations.test_robustness import Interrupted, batch_of, continued, failing, marks_on
from tests.reference import tiny_model

TOKENS, EVERY = 24, 16
POLICIES = {
    method.__name__: bounded(method, TOKENS, EVERY)
    for method in (H2O, RKV, AdaKV, KeyDiff, SnapKV, StreamingLLM)
} | {"TOVA": bounded(TOVA, TOKENS, 1), "window_of_20": bounded(SnapKV, 32, 7, window_size=20)}


# That turn keys back, or read the weights of a layer's output.
ASKING = {
    method.__name__: bounded(method, 32, EVERY) for method in (ExpectedAttention, CriticalKV)
} | {"ReplayKV": bounded(ReplayKV, 32, EVERY, head_uniform=True)}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", seed=1)


@pytest.fixture
def backend() -> Iterator[Counting]:
    torch._dynamo.reset()
    yield Counting()
    torch._dynamo.reset()


def compare(model: PreTrainedModel, name: str, room: int = 200, **how: Any) -> PolicyCache:
    """Two turns of a padded batch; the first ends in an interval, and the second with one."""
    grows, fixed = PolicyCache(POLICIES[name]), PolicyCache(POLICIES[name], max_new_tokens=room)
    given, before = batch_of(60, 35), marks_on(model)
    for count in (75, 65):
        want = generate(model, grows, given, max_new_tokens=count)
        got = generate(model, fixed, given, max_new_tokens=count, **how)
        assert_same(want, got)
        assert_same_state(grows, fixed)
        for layer, twin in zip(grows.layers, fixed.layers, strict=True):
            for one, other in (
                (layer.observed.queries, twin.observed.queries),
                (layer.observed.carried, twin.observed.carried),
            ):
                assert (one is None) == (other is None)
                assert one is None or torch.allclose(one, other, atol=1e-4)  # type: ignore[arg-type]
        given = continued(want.sequences, given["attention_mask"], 20, 9)
    assert marks_on(model) == before
    return fixed


@pytest.mark.parametrize("name", POLICIES)
def test_the_answer_is_that_of_growing_buffers(model: PreTrainedModel, name: str) -> None:
    cache = compare(model, name)
    decoding = POLICIES[name].decoding
    assert decoding is not None
    if decoding.most_tokens is not None:
        most = decoding.most_tokens + decoding.every
        assert all(each.capacity <= most for each in cache.layers)


@pytest.mark.parametrize("name", ["H2O", "AdaKV", "SnapKV"])
@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "qwen3_moe", "deepseek_v3"])
def test_families(family: str, name: str) -> None:
    """Windows that the answer outgrows; latents are decoded into buffers that grow."""
    model, given = model_of(family), batch_of(12, 9)
    want = generate(model, PolicyCache(POLICIES[name]), given, max_new_tokens=75)
    fixed = PolicyCache(POLICIES[name], max_new_tokens=75)
    assert_same(want, generate(model, fixed, given, max_new_tokens=75))


@pytest.mark.parametrize("name", ["H2O", "SnapKV", "StreamingLLM", "TOVA"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_what_is_compiled_is_compiled_once_for_all_intervals(
    backend: Counting, name: str, implementation: str
) -> None:
    """One graph of the buffers that the prompt needs, and one of those that are bounded."""
    model = tiny_model("llama", seed=1, attn_implementation=implementation)
    given = batch_of(60, 60)
    want = generate(model, PolicyCache(POLICIES[name]), given, max_new_tokens=120)
    graphs = []
    for _ in range(2):
        cache = PolicyCache(POLICIES[name], max_new_tokens=120)
        how = {"max_new_tokens": 120, "compile_config": everywhere(backend)}
        assert_same(want, generate(model, cache, given, **how))
        graphs.append(backend.graphs)
    assert backend.calls == 2 * 119
    assert graphs == [2, 2]
    buffers = weakref.ref(cache.layers[0].claim()[0])
    del cache
    gc.collect()
    assert buffers() is None


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's own
def test_inductor(model: PreTrainedModel) -> None:
    """The compiler that is used in earnest."""
    torch._dynamo.reset()
    compare(model, "H2O", compile_config=everywhere("inductor"))
    torch._dynamo.reset()


@pytest.mark.parametrize(("name", "owner"), [("SnapKV", static_decoding), ("TOVA", static_rolling)])
def test_a_model_that_makes_another_mask_is_refused(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, name: str, owner: Any
) -> None:
    monkeypatch.setattr(owner, "observed_by", lambda mask, ring: mask)
    cache = PolicyCache(POLICIES[name], max_new_tokens=40)
    with pytest.raises(UnsupportedModelError, match="leave max_new_tokens of the cache at None"):
        generate(model, cache, batch_of(60), max_new_tokens=40)


@pytest.mark.parametrize("prompts", [(60,), (9,), (9, 4), (40, 13)])
@pytest.mark.parametrize("protect", [0, 3])
def test_slots_that_are_given_up_one_by_one(
    model: PreTrainedModel, prompts: tuple[int, ...], protect: int
) -> None:
    """Of prompts that fill the budget, or not, or in one row; what is held is shown in order."""
    rule = bounded(TOVA, TOKENS, 1, protect=protect)
    given, shown = batch_of(*prompts), []

    class Looking:
        def put(self, value: Tensor) -> None:
            if cache.layers:
                kept = held(cache, len(prompts))
                assert all(head == sorted(head) for row in kept for each in row for head in each)
                shown.append(kept)

        def end(self) -> None:
            """Nothing to do."""

    cache = PolicyCache(rule, max_new_tokens=70)
    looks = {"streamer": Looking()} if len(prompts) == 1 else {}
    got = generate(model, cache, given, max_new_tokens=70, **looks)
    want, grows = [], PolicyCache(rule)
    assert_same(generate(model, grows, given, max_new_tokens=70), got)
    assert_same_state(cache, grows)
    for count in (3, 30, 50) if looks else ():
        other = PolicyCache(rule)
        generate(model, other, given, max_new_tokens=count)
        want.append(held(other, 1))
        # Before the choice that the next step begins with there is one entry more.
        pairs = zip(shown[count], want[-1], strict=True)
        assert all(
            set(chosen) <= set(head)
            for row, other_row in pairs
            for each, other_each in zip(row, other_row, strict=True)
            for head, chosen in zip(each, other_each, strict=True)
        )


class Forking:
    """A streamer that copies and saves its cache after some tokens."""

    def __init__(self, cache: PolicyCache, at: int, path: Path) -> None:
        self.cache, self.at, self.path, self.calls = cache, at, path, 0
        self.fork: PolicyCache | None = None

    def put(self, value: Tensor) -> None:
        self.calls += 1
        if self.calls == self.at:
            self.fork = copy.copy(self.cache)
            self.cache.save(self.path)

    def end(self) -> None:
        """Nothing to do."""


def goes_on_as(model: PreTrainedModel, others: Sequence[PolicyCache], want: PolicyCache) -> None:
    """Caches go on as one that has read as much into buffers that grow."""
    later = torch.randint(1, 97, (1, 40), generator=torch.Generator().manual_seed(3))
    logits = go_on(model, want, later)
    for other in others:
        assert (go_on(model, other, later) - logits).abs().max() <= 1e-4
        assert_same_state(other, want)


@pytest.mark.parametrize("at", [34, 42])
@pytest.mark.parametrize("name", [*POLICIES, *ASKING])
def test_a_copy_made_on_the_way_keeps_what_there_was(
    model: PreTrainedModel, name: str, at: int, tmp_path: Path
) -> None:
    """In the middle of an interval, and where layers are to choose before the next step."""
    given, policy = batch_of(60), (POLICIES | ASKING)[name]
    cache = PolicyCache(policy, max_new_tokens=70)
    forking = Forking(cache, at, tmp_path / "answer.safetensors")
    said = generate(model, cache, given, max_new_tokens=70, streamer=forking)
    assert forking.fork is not None
    want = PolicyCache(policy)
    assert_same(generate(model, PolicyCache(policy), given, max_new_tokens=70), said)
    generate(model, want, given, max_new_tokens=at - 1)
    goes_on_as(model, [forking.fork, PolicyCache.load(forking.path)], want)


@pytest.mark.parametrize("name", ["H2O", "SnapKV", "TOVA"])
@pytest.mark.parametrize("step", [17, 21])
def test_a_copy_made_within_a_step_is_without_its_token(
    model: PreTrainedModel, name: str, step: int, tmp_path: Path
) -> None:
    """The first step of an interval, and one in its middle."""
    cache, given = PolicyCache(POLICIES[name], max_new_tokens=70), batch_of(60)
    forks: list[PolicyCache] = []

    def fork(*args: Any) -> None:
        if cache.get_seq_length() == 60 + step and not forks:
            forks.append(copy.copy(cache))
            cache.save(tmp_path / "cache")

    handle = model.get_submodule("model.layers.2.mlp").register_forward_hook(fork)
    said = generate(model, cache, given, max_new_tokens=40)
    handle.remove()
    assert_same(generate(model, PolicyCache(POLICIES[name]), given, max_new_tokens=40), said)
    want = PolicyCache(POLICIES[name])
    generate(model, want, given, max_new_tokens=step)
    goes_on_as(model, [*forks, PolicyCache.load(tmp_path / "cache")], want)


@pytest.mark.parametrize("name", ["H2O", "AdaKV", "TOVA"])
@pytest.mark.parametrize("prompts", [(9,), (9, 4), (20, 11)])
@pytest.mark.parametrize("room", [6, 13])
def test_buffers_are_no_longer_than_prompt_and_answer_need(
    model: PreTrainedModel, name: str, prompts: tuple[int, ...], room: int
) -> None:
    """A longer answer gets as much again, until there is memory for the bound."""
    given, most = batch_of(*prompts), max(prompts)
    policy, longest = POLICIES[name], []

    def note(*args: Any) -> None:
        static = cache._static
        if static is not None:
            longest.append(max(buffers.keys.shape[2] for buffers in static.layers))

    cache = PolicyCache(policy, max_new_tokens=room)
    handle = model.get_submodule("lm_head").register_forward_hook(note)
    said = generate(model, cache, given, max_new_tokens=50)
    handle.remove()
    want = PolicyCache(policy)
    assert_same(generate(model, want, given, max_new_tokens=50), said)
    assert_same_state(cache, want)
    decoding = policy.decoding
    assert decoding is not None
    # Heads of unlike budgets know no bound.
    bound = math.inf if decoding.most_tokens is None else decoding.most_tokens + decoding.every
    assert len(longest) == 49
    for step, capacity in enumerate(longest):
        again = step // room + 1
        assert capacity <= min(bound, most + again * room)


@pytest.mark.parametrize("name", ["H2O", "AdaKV", "TOVA"])
@pytest.mark.parametrize("step", [3, 17, 18, 34])
@pytest.mark.parametrize("error", [RuntimeError, Interrupted])
def test_what_fails_in_a_step_is_taken_back(
    model: PreTrainedModel, name: str, step: int, error: Any
) -> None:
    given = batch_of(60, 35)
    cache, want = PolicyCache(POLICIES[name], max_new_tokens=99), PolicyCache(POLICIES[name])
    with failing(model, "layers.2.mlp", step, error()), pytest.raises(error):
        generate(model, cache, given, max_new_tokens=50)
    generate(model, want, given, max_new_tokens=step - 1)
    assert_same_state(cache, want)
    assert held(cache, 2) == held(want, 2)
    assert cache.report().total.held_bytes == want.report().total.held_bytes


@contextmanager
def interrupted(owner: Any, name: str, call: int) -> Iterator[None]:
    """A method that is interrupted when it is called for the ``call``-th time, from 1."""
    original, calls = getattr(owner, name), []

    def method(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            raise Interrupted
        return original(*args, **kwargs)

    setattr(owner, name, method)
    try:
        yield
    finally:
        setattr(owner, name, original)


@pytest.mark.parametrize("place", [(Selection, "store"), (PolicyLayer, "move_into")])
@pytest.mark.parametrize("call", [5, 7])
def test_a_choice_that_is_interrupted_is_finished(
    model: PreTrainedModel, place: tuple[Any, str], call: int
) -> None:
    """In the second interval: after the first other buffers are made."""
    given, every_step = batch_of(60, 35), 2 * EVERY
    cache = PolicyCache(POLICIES["H2O"], max_new_tokens=99)
    call = call - 4 * (place[1] == "move_into")
    with interrupted(*place, call), pytest.raises(Interrupted):
        generate(model, cache, given, max_new_tokens=50)
    want = PolicyCache(POLICIES["H2O"])
    generate(model, want, given, max_new_tokens=every_step + 1)
    assert_same_state(cache, want)
    assert str(cache.report()) == str(want.report())
    later = torch.randint(1, 97, (2, 20))
    assert torch.allclose(go_on(model, cache, later), go_on(model, want, later), atol=1e-4)
