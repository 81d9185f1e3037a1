"""A prompt that is seen whole, and a window of what follows it (Unlimited OCR)."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from kvpolicy import CachePolicy
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.model.kinds import ReferenceWindow
from kvpolicy.integrations.transformers.model.parts import ModelParts
from kvpolicy.policies import FastKV, FullContext, SnapKV
from tests.integrations.hybrids.models import apart, generate, padded, tokens
from tests.integrations.model.builds.catalogue import builds
from tests.integrations.model.builds.dense import Seen, dense_logits
from tests.integrations.model.builds.sizes import WINDOW
from tests.integrations.test_generation import assert_same_state

if "unlimited_ocr" not in builds():
    pytest.skip("Transformers has no such model yet", allow_module_level=True)
ROWS = [tokens(0, 47), tokens(1, 31)]
SAID = WINDOW + 9
POLICIES: dict[str, CachePolicy] = {
    "full_context": FullContext(),
    "snapkv": SnapKV(0.35, window_size=4),
    "fastkv": FastKV(tsp_layer=1, tsp_rate=0.6, retention_rate=0.35, window_size=4),
}
SNAPKV = POLICIES["snapkv"]


@cache
def model() -> PreTrainedModel:
    return builds()["unlimited_ocr"].model()


def seen(store: PolicyCache, row: int, end: int, length: int) -> list[Seen]:
    """By layer, what each token sees: of the answer a window, of the prompt what is held."""
    places, layers = torch.arange(length), []
    later, reaching = places >= end, torch.ones(length, dtype=torch.bool)
    near = later[None] & (places[None] > places[:, None] - WINDOW)
    for index, layer in enumerate(store.layers):
        keys = []
        for kept in layer.positions[row]:
            held = torch.zeros(length, dtype=torch.bool)
            held[kept[(kept >= 0) & (kept < end)]] = True
            keys.append(torch.where(later[:, None], held[None] | near, reaching[None]))
        eye = torch.eye(length, dtype=torch.bool)
        layers.append(Seen(torch.stack(keys) | eye, reaching))
        if index in store.propagated:
            passed = store.propagated[index][row]
            reaching = later.clone()
            reaching[passed[passed >= 0]] = True
    return layers


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS], ids=["one", "padded"])
@pytest.mark.parametrize("policy", POLICIES)
def test_an_answer_longer_than_the_window(policy: str, rows: list[list[int]]) -> None:
    store = PolicyCache(POLICIES[policy])
    said, logits = generate(model(), store, *padded(rows), max_new_tokens=SAID)
    for row, ids in enumerate(rows):
        whole, end = ids + said[row, -SAID:-1].tolist(), len(ids)
        want = dense_logits(model(), whole, end, seen(store, row, end, len(whole)))
        assert apart(logits[row], want[end - 1 :]) < 1e-4
        unbound = dense_logits(model(), whole, end)
        assert apart(unbound[-1], want[-1]) > 1e-2


def test_with_everything_it_is_the_models_own() -> None:
    """Of a row alone: its own cache puts the mask of padding elsewhere once the window moves."""
    own = DynamicCache(config=model().config)
    want, found = (
        generate(model(), each, torch.tensor(ROWS[:1]), max_new_tokens=SAID)[1]
        for each in (own, PolicyCache(FullContext()))
    )
    torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "how",
    [{"prefill_chunk_size": 16}, {"prompt_lookup_num_tokens": 3}, {"num_beams": 2}],
    ids=["chunks", "drafts", "beams"],
)
def test_ways_of_reading_and_writing(how: dict[str, Any]) -> None:
    policy = FullContext() if "num_beams" in how else SNAPKV
    ids = torch.tensor(ROWS[:1])
    plain = DynamicCache(config=model().config) if "num_beams" in how else PolicyCache(policy)
    beams = how if "num_beams" in how else {}
    want, _ = generate(model(), plain, ids, max_new_tokens=SAID, **beams)
    found, _ = generate(model(), PolicyCache(policy), ids, max_new_tokens=SAID, **how)
    assert torch.equal(found, want)


def test_a_file_and_a_copy_go_on_alike(tmp_path: Path) -> None:
    """In the middle of an answer."""
    store, ids = PolicyCache(SNAPKV), torch.tensor(ROWS[:1])

    def read(cache: PolicyCache, new: torch.Tensor) -> torch.Tensor:
        with cache.attached(model()), torch.no_grad():
            return model()(new, past_key_values=cache).logits

    read(store, ids)
    answer = [torch.tensor([[token]]) for token in tokens(4, SAID)]
    for token in answer[: SAID // 2]:
        read(store, token)
    store.save(tmp_path / "cache")
    others = PolicyCache.load(tmp_path / "cache"), copy.deepcopy(store)
    for token in answer[SAID // 2 :]:
        want = read(store, token)
        for other in others:
            assert torch.equal(read(other, token), want)
    for other in others:
        assert_same_state(store, other)


def test_a_second_turn_is_refused() -> None:
    store = PolicyCache(SNAPKV)
    said, _ = generate(model(), store, torch.tensor(ROWS[:1]))
    before = copy.deepcopy(store)
    with pytest.raises(UnsupportedModelError, match="there can be no second turn with Unlimited"):
        generate(model(), store, torch.cat([said, said[:, :5]], dim=1))
    assert_same_state(store, before)
    with store.attached(model()), torch.no_grad():
        model()(said[:, -1:], past_key_values=store)


def test_what_the_model_is_taken_for() -> None:
    parts = ModelParts(model())
    assert parts.kinds == [ReferenceWindow(WINDOW)] * 4
    assert parts.windows == [None] * 4
    assert parts.eligible == list(range(4))
