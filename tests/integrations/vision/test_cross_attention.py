"""Layers that attend to an image instead of the tokens: held as they are, whatever is evicted."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvpolicy import CachePolicy
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.checking import check_model
from kvpolicy.integrations.transformers.state.cross import CrossLayer
from kvpolicy.integrations.transformers.surface import CACHE
from kvpolicy.policies import FastKV, FullContext, SnapKV, StreamingLLM
from tests.integrations.hybrids.models import apart, generate, tokens
from tests.integrations.model.builds.catalogue import builds
from tests.integrations.model.builds.dense import Seen, decoder_layers, dense_logits
from tests.integrations.model.builds.judge import DECODED, seen_by
from tests.integrations.support.conversation import left_padded

ROWS = [tokens(0, 47), tokens(1, 31)]
CROSS, TILES, SIDE, PATCHES = 1, 4, 32, 17
POLICIES: dict[str, CachePolicy] = {
    "full_context": FullContext(),
    "streamingllm": StreamingLLM(0.35),
    "snapkv": SnapKV(0.35, window_size=4),
    "fastkv": FastKV(tsp_layer=0, tsp_rate=0.6, retention_rate=0.35, window_size=4),
}
SNAPKV = POLICIES["snapkv"]
TOLERANCE = 1e-4


@cache
def model() -> PreTrainedModel:
    return builds()["mllama"].model()


def image(row: int, length: int, columns: int) -> dict[str, Tensor]:
    """An image of two tiles, which the tokens from the row's fifth on see."""
    generator = torch.Generator().manual_seed(50 + row)
    seen = torch.zeros(1, columns, 1, TILES, dtype=torch.int64)
    seen[:, columns - length + 4 :, :, :2] = 1
    return {
        "pixel_values": torch.randn(1, 1, TILES, 3, SIDE, SIDE, generator=generator),
        "aspect_ratio_ids": torch.tensor([[2]]),  # [1, 2]
        "aspect_ratio_mask": torch.tensor([[[1, 1, 0, 0]]]),
        "cross_attention_mask": seen,
    }


def images(rows: list[list[int]], numbers: list[int] | None = None) -> dict[str, Tensor]:
    """Those of a padded batch."""
    longest = max(map(len, rows))
    numbers = list(range(len(rows))) if numbers is None else numbers
    each = [image(i, len(row), longest) for i, row in zip(numbers, rows, strict=True)]
    return {name: torch.cat([one[name] for one in each]) for name in each[0]}


def read(rows: list[list[int]], policy: CachePolicy = SNAPKV) -> tuple[PolicyCache, Tensor]:
    """A cache that has read rows with their images, and what was said."""
    store = PolicyCache(policy)
    said, _ = generate(model(), store, *left_padded(rows), **images(rows))
    return store, said


def goes_on(store: Any, said: Tensor, rows: list[list[int]]) -> Tensor:
    """Logits of a second turn, whose tokens see the images of the first."""
    longest = max(map(len, rows))
    more = torch.tensor([tokens(7 + row, 9) for row in range(len(rows))])
    ids = torch.cat([said, more], dim=1)
    mask = torch.ones_like(ids)
    seen = torch.zeros(len(rows), ids.shape[1], 1, TILES, dtype=torch.int64)
    for row, each in enumerate(rows):
        mask[row, : longest - len(each)] = 0
        seen[row, longest - len(each) + 4 :, :, :2] = 1
    return generate(model(), store, ids, mask, cross_attention_mask=seen)[1]


def held(store: PolicyCache) -> list[Tensor]:
    found: list[Tensor] = []
    for layer in store.layers:
        if layer.positions is not None:
            there = (layer.positions >= 0)[..., None]
            found += [layer.positions, layer.keys * there, layer.values * there]
        elif layer.keys is not None:
            found += [layer.keys, layer.values]
    return found


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS, ROWS[::-1]], ids=["one", "two", "turned"])
@pytest.mark.parametrize("policy", POLICIES)
def test_each_row_with_its_image_against_dense_attention(
    policy: str, rows: list[list[int]]
) -> None:
    store, new = PolicyCache(POLICIES[policy]), 1 + DECODED
    said, logits = generate(model(), store, *left_padded(rows), **images(rows), max_new_tokens=new)
    for row, ids in enumerate(rows):
        whole, end = ids + said[row, -new:-1].tolist(), len(ids)
        seen = seen_by(store, row, end)
        seen[CROSS] = Seen(None, torch.ones(len(whole), dtype=torch.bool))  # each by itself
        beside = image(row, len(whole), len(whole))
        want = dense_logits(model(), whole, end, seen, beside=beside)
        assert apart(logits[row], want[end - 1 :]) < TOLERANCE
        other = dense_logits(model(), whole, end, seen, beside=image(9, len(whole), len(whole)))
        assert apart(other[end - 1 :], want[end - 1 :]) > 1e-3


def test_all_of_an_image_is_held_and_counted() -> None:
    store, _ = read(ROWS)
    layer, line = store.layers[CROSS], store.report().layers[CROSS]
    assert isinstance(layer, CrossLayer)
    assert layer.positions is None
    assert layer.keys.shape == layer.values.shape == (2, 2, TILES * PATCHES, 16)
    assert line.held_bytes == line.full_bytes == layer.keys.nbytes + layer.values.nbytes
    assert not line.holds_tokens
    own = DynamicCache(config=model().config)
    generate(model(), own, *left_padded(ROWS), **images(ROWS))
    torch.testing.assert_close(layer.keys, own.layers[CROSS].keys)
    torch.testing.assert_close(layer.values, own.layers[CROSS].values)


def test_two_turns_with_everything_are_the_models_own() -> None:
    own, store = DynamicCache(config=model().config), PolicyCache(FullContext())
    want, found = (
        goes_on(each, generate(model(), each, *left_padded(ROWS), **images(ROWS))[0], ROWS)
        for each in (own, store)
    )
    torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("with_image", [True, False])
def test_a_file_and_a_copy_go_on_alike(with_image: bool, tmp_path: Path) -> None:
    store, more = PolicyCache(SNAPKV), images(ROWS) if with_image else {}
    said, _ = generate(model(), store, *left_padded(ROWS), **more)
    assert (store.layers[CROSS].keys is not None) is with_image
    store.save(tmp_path / "cache")
    others = PolicyCache.load(tmp_path / "cache"), copy.deepcopy(store)
    want = goes_on(store, said, ROWS)
    for other in others:
        assert torch.equal(goes_on(other, said, ROWS), want)
        assert all(map(torch.equal, held(other), held(store)))


def test_rows_are_reordered_and_repeated() -> None:
    store, said = read(ROWS)
    want = goes_on(copy.deepcopy(store), said, ROWS)
    store.reorder_cache(torch.tensor([1, 0]))
    store.batch_repeat_interleave(2)
    keep = torch.tensor([0, 3])
    store.batch_select_indices(keep)
    assert store.layers[CROSS].keys.shape[0] == 2
    before = held(store)
    store.reorder_cache(torch.tensor([1, 0]))
    assert all(torch.equal(a, b[[1, 0]]) for a, b in zip(held(store), before, strict=True))
    torch.testing.assert_close(goes_on(store, said, ROWS), want, atol=1e-4, rtol=1e-4)


def test_tokens_are_taken_back_and_images_stay() -> None:
    store, _ = read(ROWS)
    keys = store.layers[CROSS].keys
    store.crop(-2)
    assert torch.equal(store.layers[CROSS].keys, keys)
    store.reset()
    assert store.layers[CROSS].keys is None


def test_beams_are_the_models_own() -> None:
    own, store = DynamicCache(config=model().config), PolicyCache(FullContext())
    want, found = (
        generate(model(), each, *left_padded(ROWS[:1]), **images(ROWS[:1]), num_beams=3)[0]
        for each in (own, store)
    )
    assert torch.equal(found, want)


class Broken(Exception):  # noqa: N818
    pass


def fail(*_: Any) -> None:
    raise Broken


@torch.no_grad()
@pytest.mark.parametrize("turn", [0, 1])
def test_a_failure_behind_an_image_is_undone(turn: int) -> None:
    store, ids = PolicyCache(SNAPKV), torch.tensor(ROWS[:1])
    more = images(ROWS[:1])
    with store.attached(model()):
        if turn:
            model()(ids, **{CACHE: store}, **more)
            store.start_turn()
        before = held(store)
        handle = decoder_layers(model())[-1].register_forward_hook(fail)
        try:
            with pytest.raises(Broken):
                model()(ids, **{CACHE: store}, **({} if turn else more))
        finally:
            handle.remove()
    assert len(held(store)) == len(before)
    assert all(map(torch.equal, held(store), before))
    assert store.layers[CROSS].is_initialized is bool(turn)


def test_the_self_check_reads_text() -> None:
    assert check_model(model()).refusal is None
