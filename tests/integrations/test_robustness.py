"""What must not happen: caches that share a model and meet, failures that leave traces."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, StoppingCriteria

from kvpolicy import CachePolicy
from kvpolicy.errors import CacheInUseError
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.surface import CACHE
from kvpolicy.policies import (
    H2O,
    AdaKV,
    FastKV,
    FullContext,
    GemFilter,
    PyramidInfer,
    PyramidKV,
    SnapKV,
    StreamingLLM,
)
from tests.integrations.support.conversation import METHODS, left_padded
from tests.integrations.support.reading import marks_on
from tests.integrations.test_generation import CHUNKS_GO_ON
from tests.reference import random_tokens, tiny_model

# The filter layer of four lies in the middle, so that layers on either side of it can fail.
GEM = GemFilter(filter_layer=2, retention_rate=0.3)
POLICIES: dict[str, CachePolicy] = {
    "full_context": FullContext(),
    "streamingllm": StreamingLLM(0.3),
    "snapkv": SnapKV(0.3),
    "h2o": H2O(0.3),
    "pyramidkv": PyramidKV(0.3),
    "adakv": AdaKV(0.3),
    "fastkv": FastKV(tsp_rate=0.5, retention_rate=0.3),
    "staged": METHODS["two_stages"][0],
    "pyramidinfer": PyramidInfer(min_context=8),
    "gemfilter": GEM,
}


def batch_of(*lengths: int, seed: int = 0) -> dict[str, Tensor]:
    ids, mask = left_padded([random_tokens(seed + row, each) for row, each in enumerate(lengths)])
    return {"inputs": ids, "attention_mask": mask}


def generate(model: Any, cache: Any, given: dict[str, Tensor], **kwargs: Any) -> Tensor:
    kwargs = {"max_new_tokens": 5, "do_sample": False, **kwargs}
    return model.generate(cache=cache, **given, **kwargs)


def continued(said: Tensor, mask: Tensor, *lengths: int, seed: int = 50) -> dict[str, Tensor]:
    """The next turn after what a batch has read and said."""
    added = batch_of(*lengths, seed=seed)
    past = torch.cat([mask, mask.new_ones(len(mask), said.shape[1] - mask.shape[1])], dim=1)
    return {
        "inputs": torch.cat([said, added["inputs"]], dim=1),
        "attention_mask": torch.cat([past, added["attention_mask"]], dim=1),
    }


def two_turns(model: PreTrainedModel, policy: CachePolicy | None, **kwargs: Any) -> Iterator[Any]:
    """Tokens and positions after each of two turns of a padded batch; tokens without a policy."""
    cache, given = policy and PolicyCache(policy), batch_of(40, 23)
    for _ in range(2):
        said = generate(model, cache, given, **kwargs)
        yield said.tolist(), [layer.positions.tolist() for layer in cache.layers] if cache else []
        given = continued(said, given["attention_mask"], 6, 15)


# Caches that share a model.


def test_caches_of_all_policies_alternate_on_one_model(model: PreTrainedModel) -> None:
    """Turn by turn by `generate`, each gives what it gives alone."""
    alone = {name: list(two_turns(model, policy)) for name, policy in POLICIES.items()}
    running = {name: two_turns(model, policy) for name, policy in POLICIES.items()}
    for turn in range(2):
        for name, conversation in running.items():
            assert next(conversation) == alone[name][turn], name


@torch.no_grad()
def test_caches_attached_at_once_alternate_forward_by_forward(model: PreTrainedModel) -> None:
    def forwards(policy: CachePolicy) -> Iterator[Tensor]:
        cache, given = PolicyCache(policy), batch_of(40)
        with cache.attached(model):
            yield model(given["inputs"], cache=cache).logits[:, -1]
            for token in (5, 9):
                yield model(torch.tensor([[token]]), cache=cache).logits[:, -1]
            cache.start_turn()
            yield model(batch_of(30, seed=7)["inputs"], cache=cache).logits[:, -1]

    alone = {name: list(forwards(policy)) for name, policy in POLICIES.items()}
    running = {name: forwards(policy) for name, policy in POLICIES.items()}
    for step in range(4):
        for name, conversation in running.items():
            assert torch.equal(next(conversation), alone[name][step]), name
    for conversation in running.values():
        conversation.close()


class ThroughAnotherCache(nn.Module):
    """In the place of an MLP: while one cache's forward is under way, runs another's."""

    def __init__(self, model: PreTrainedModel, mlp: nn.Module, policy: CachePolicy) -> None:
        super().__init__()
        self.inner, self.mlp, self.policy = [model], mlp, policy
        self.results: list[Tensor] = []

    def forward(self, hidden: Tensor) -> Tensor:
        (model,) = self.inner
        if not self.results:
            self.results.append(torch.empty(0))  # the inner forward comes through here as well
            cache = PolicyCache(self.policy)
            with cache.attached(model):
                logits = model(batch_of(30, seed=3)["inputs"], cache=cache).logits
            self.results.append(logits[:, -1])
        return self.mlp(hidden)


@torch.no_grad()
@pytest.mark.parametrize("inner", ["fastkv", "gemfilter"])
@pytest.mark.parametrize("outer", ["fastkv", "gemfilter", "snapkv"])
def test_a_forward_inside_another_caches_forward(outer: str, inner: str) -> None:
    model = tiny_model("llama", seed=1)
    expected = [
        next(two_turns(model, POLICIES[outer])),
        next(forward_of(model, POLICIES[inner], 30, seed=3)),
    ]
    nested = ThroughAnotherCache(model, model.model.layers[1].mlp, POLICIES[inner])
    model.model.layers[1].mlp = nested
    assert next(two_turns(model, POLICIES[outer])) == expected[0]
    assert torch.equal(nested.results[1], expected[1])


def forward_of(
    model: PreTrainedModel, policy: CachePolicy, length: int, seed: int
) -> Iterator[Tensor]:
    cache = PolicyCache(policy)
    with cache.attached(model):
        yield model(batch_of(length, seed=seed)["inputs"], cache=cache).logits[:, -1]


@pytest.mark.skipif(not CHUNKS_GO_ON, reason="this Transformers cuts masks of chunks wrongly")
@pytest.mark.parametrize(
    "pair",
    [
        ("gemfilter", "gemfilter"),
        ("gemfilter", "fastkv"),
        ("adakv", "pyramidinfer"),
        ("staged", "h2o"),
        ("snapkv", "no policy"),
    ],
    ids="+".join,
)
def test_two_threads_generate_at_once(model: PreTrainedModel, pair: tuple[str, str]) -> None:
    """One in a padded batch over two turns; the other one, where it may, in chunks or drafts."""
    first, second = (POLICIES.get(name) for name in pair)
    whole = second is None or second.propagation.acting_layers(4)
    work = [(first, {}), (second, {} if whole else {"prefill_chunk_size": 7})]
    expected = [list(two_turns(model, policy, **how)) for policy, how in work]
    before, failures = marks_on(model), []
    start = threading.Barrier(len(work))

    def run(index: int) -> None:
        policy, how = work[index]
        try:
            start.wait()
            for _ in range(4):
                if list(two_turns(model, policy, **how)) != expected[index]:
                    failures.append(f"{policy} differs")
        except BaseException as error:
            failures.append(repr(error))

    with switching_often():
        threads = [threading.Thread(target=run, args=(index,)) for index in range(len(work))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    assert marks_on(model) == before


class Held(StoppingCriteria):
    """Holds a generate at its first token until somebody lets it go on."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        self.reached.set()
        assert self.go_on.wait(30)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def test_a_second_thread_with_the_same_cache(model: PreTrainedModel) -> None:
    """It is told so, at `generate` and at a call of its own; the first one's answer is right."""
    ids = torch.tensor([random_tokens(2, 40)])
    expected = model.generate(ids, cache=PolicyCache(GEM), max_new_tokens=4)
    cache, held, found = PolicyCache(GEM), Held(), []
    arguments: dict[str, Any] = {CACHE: cache, "max_new_tokens": 4}

    def run() -> None:
        found.append(model.generate(ids, stopping_criteria=[held], **arguments))

    thread = threading.Thread(target=run, name="the first")
    thread.start()
    assert held.reached.wait(30)
    for use in (lambda: model.generate(ids, **arguments), cache.attached(model).__enter__):
        with pytest.raises(CacheInUseError, match="but thread 'the first' is using it; give every"):
            use()
    held.go_on.set()
    thread.join()
    assert found[0].tolist() == expected.tolist()


def test_a_second_thread_inside_a_forward(model: PreTrainedModel) -> None:
    ids = torch.tensor([random_tokens(2, 40)])
    cache, again = PolicyCache(GEM), PolicyCache(GEM)
    inside, go_on = threading.Event(), threading.Event()
    found: list[Tensor] = []

    def hold(module: nn.Module, args: Any) -> None:
        if threading.current_thread().name == "the first":
            inside.set()
            assert go_on.wait(30)

    def run() -> None:
        found.append(model(ids, cache=cache).logits)

    handle = model.model.layers[3].register_forward_pre_hook(hold)
    try:
        with torch.no_grad(), again.attached(model):
            expected = model(ids, cache=again).logits
        with torch.no_grad(), cache.attached(model):
            thread = threading.Thread(target=torch.no_grad()(run), name="the first")
            thread.start()
            assert inside.wait(30)
            with pytest.raises(CacheInUseError, match="but thread 'the first' is using it"):
                model(ids, cache=cache)
            go_on.set()
            thread.join()
            assert cache.get_seq_length() == 40
    finally:
        handle.remove()
    torch.testing.assert_close(found[0], expected)


@contextmanager
def switching_often() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


# Failures.


@contextmanager
def failing(model: PreTrainedModel, place: str, call: int, error: Any) -> Iterator[list[int]]:
    """A module raises on a call of its own, counted from 1; the list holds the calls so far."""
    calls: list[int] = []

    def fail(*args: Any) -> None:
        calls.append(1)
        if len(calls) == call:
            raise error

    path = place if place == "lm_head" else f"model.{place}"
    handle = model.get_submodule(path).register_forward_pre_hook(fail)
    try:
        yield calls
    finally:
        handle.remove()
