"""A policy over keys and values that are quantised, or held away from the device."""

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy import CachePolicy
from kvpolicy.integrations.transformers import (
    OffloadedStorage,
    PlainStorage,
    PolicyCache,
    QuantizedStorage,
    Storage,
)
from kvpolicy.integrations.transformers.state import storage
from kvpolicy.policies import FastKV, FullContext, GemFilter, ReplayKV, SnapKV
from tests.integrations.support.conversation import left_padded
from tests.reference import random_tokens

PACKAGES = {"quanto": "optimum", "hqq": "hqq"}
BACKENDS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            importlib.util.find_spec(package) is None, reason=f"{name} is not installed"
        ),
    )
    for name, package in PACKAGES.items()
]
POLICIES: dict[str, CachePolicy] = {
    "full_context": FullContext(),
    "snapkv": SnapKV(0.4),
    "fastkv": FastKV(tsp_rate=0.5, retention_rate=0.3),
    "gemfilter": GemFilter(retention_rate=0.4),
    "replaykv": ReplayKV(0.4),
}


def turns(model: PreTrainedModel, cache: PolicyCache) -> tuple[list[Tensor], list[Any]]:
    """Logits and what is kept over two turns of a padded batch, of tokens that are given."""
    ids, mask = left_padded([random_tokens(0, 60), random_tokens(1, 43)])
    logits, kept = [], []
    with torch.no_grad(), cache.attached(model):
        for turn in range(2):
            cache.start_turn()
            new = ids if turn == 0 else torch.tensor([random_tokens(5, 25), random_tokens(6, 25)])
            if turn:
                mask = torch.cat([mask, torch.ones_like(new)], dim=1)
            logits.append(model(new, attention_mask=mask, cache=cache).logits[:, -1])
            kept.append([layer.positions for layer in cache.layers])
            for step in range(9):
                token = torch.full((2, 1), 3 + step)
                mask = torch.cat([mask, torch.ones_like(token)], dim=1)
                output = model(token, attention_mask=mask, cache=cache)
                logits.append(output.logits[:, -1])
            cache.crop(-3)
            mask = mask[:, :-3]
    return logits, kept


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_quantised_storage_is_close_and_small(
    model: PreTrainedModel, name: str, backend: str
) -> None:
    """The first turn chooses before anything is quantised; later logits are near the plain ones."""
    how = {"backend": backend, "q_group_size": 8, "residual_length": 4}
    nbits = {"quanto": 4, "hqq": 8}[backend]
    cache = PolicyCache(POLICIES[name], QuantizedStorage(nbits=nbits, **how))
    plain = PolicyCache(POLICIES[name])
    logits, kept = turns(model, cache)
    expected, chosen = turns(model, plain)
    assert torch.equal(logits[0], expected[0])
    for one, other in zip(kept[0], chosen[0], strict=True):
        assert torch.equal(one, other)
    for one, other in zip(logits[1:10], expected[1:10], strict=True):
        spread = expected[1].std()
        assert 0 < (one - other).abs().mean() < spread / 2
    bits = 32 * cache.report().total.held_bytes / plain.report().total.held_bytes
    assert bits < {"quanto": 16, "hqq": 22}[backend]  # scales and what is recent come on top


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_beams_over_quantised_storage(model: PreTrainedModel, backend: str) -> None:
    storage = QuantizedStorage(backend, nbits=8 if backend == "hqq" else 4, q_group_size=8)
    ids = torch.tensor([random_tokens(0, 60)])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        cache=PolicyCache(SnapKV(0.4), storage),
        max_new_tokens=6,
        num_beams=3,
        do_sample=False,
    )
    assert output.shape[1] == 66


def test_bad_storage() -> None:
    with pytest.raises(TypeError, match="storage must be a Storage"):
        PolicyCache(SnapKV(), "offloaded")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="backend must be one of quanto, hqq, got 'int4'"):
        QuantizedStorage("int4")
    with pytest.raises(ValueError, match="nbits must be at least 1, got 0"):
        QuantizedStorage(nbits=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_group_that_does_not_divide_the_head(model: PreTrainedModel, backend: str) -> None:
    cache = PolicyCache(SnapKV(0.4), QuantizedStorage(backend, q_group_size=64))
    ids = torch.tensor([random_tokens(0, 60)])
    with torch.no_grad(), cache.attached(model), pytest.raises(ValueError, match="q_group_size"):
        model(ids, cache=cache)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("backend", [name for name, package in PACKAGES.items()])
def test_a_backend_that_is_not_installed(backend: str) -> None:
    if importlib.util.find_spec(PACKAGES[backend]) is not None:
        pytest.skip(f"{backend} is installed")
    with pytest.raises(ImportError, match=backend):
        QuantizedStorage(backend)


@pytest.mark.parametrize("storage", [PlainStorage(), OffloadedStorage()], ids=str)
def test_held_by_hand(storage: Storage) -> None:
    keys = torch.arange(24.0).view(2, 1, 3, 4)
    held = storage.hold(keys, keys[..., :2]).appended(keys[:, :, :1], keys[:, :, :1, :2])
    assert held.shape == (2, 1, 4, 4)
    assert held.nbytes() == 2 * held.capacity * (4 + 2) * 4
    assert torch.equal(held.first(2).read()[0], keys[:, :, :2])
    assert torch.equal(held.rows(torch.tensor([1])).read()[1][0, 0, 3], keys[1, 0, 0, :2])


def test_few_bytes_are_copied_with_each_token_and_no_memory_is_left_over() -> None:
    keys = torch.arange(6.0).view(1, 1, 3, 2)
    held, token = PlainStorage().hold(keys, keys), torch.full((1, 1, 1, 2), 9.0)
    for count in range(4, 60):
        held = held.appended(token, token)
        assert held.capacity == held.shape[2] == count
    assert torch.equal(held.read()[0][:, :, :3], keys)
    assert bool((held.read()[1][:, :, 3:] == 9).all())


def test_appending_copies_once_in_many_steps_and_never_what_others_see(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(storage, "COPIED_BYTES", 0)
    keys = torch.arange(6.0).view(1, 1, 3, 2)
    first = PlainStorage().hold(keys, keys)
    assert first.capacity == 3  # nothing is held for what may come
    token = torch.full((1, 1, 1, 2), 9.0)
    held = first.appended(token, token)
    start = held.read()[0].data_ptr()
    steps = 0
    while held.read()[0].data_ptr() == start:
        held = held.appended(token + steps, token)
        steps += 1
    assert steps == 17
    assert torch.equal(first.read()[0], keys)
    # Two that go on from the same place do not see each other's tokens.
    fork = held.appended(token, token)
    one, other = fork.appended(token + 1, token), fork.appended(token + 2, token)
    assert float(one.read()[0][0, 0, -1, 0]) == 10
    assert float(other.read()[0][0, 0, -1, 0]) == 11
    assert fork.shape[2] == one.shape[2] - 1


def test_appending_in_and_out_of_inference_mode_and_with_gradients() -> None:
    token = torch.ones(1, 1, 1, 2)
    with torch.inference_mode():
        held = PlainStorage().hold(token, token).appended(token, token)
    held = held.appended(token + 1, token)
    needs = token.clone().requires_grad_()
    held = held.appended(needs, needs)
    held.read()[0].sum().backward()
    assert torch.equal(needs.grad, torch.ones_like(token))
    assert held.appended(token, token).read()[0][0, 0, :, 0].tolist() == [1, 1, 2, 1, 1]
