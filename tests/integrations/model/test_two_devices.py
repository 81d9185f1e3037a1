"""A model whose later layers are on another device than its inputs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy.integrations.transformers import OffloadedStorage, PolicyCache
from kvpolicy.integrations.transformers.state.storage import PlainStorage, Storage
from tests.integrations.model.two_devices import FAR, Far, far_reachable, split_over_two_devices
from tests.integrations.support.conversation import (
    METHODS,
    assert_alike,
    left_padded,
    run_conversation,
)
from tests.reference import random_tokens, tiny_model

NAMES = (
    "full_context",
    "streamingllm",
    "snapkv",
    "h2o",
    "fastkv",  # drops on the first device
    "fastkv_tokens",  # drops on the second
    "gemfilter",  # chooses on the second
    "pyramidinfer",  # drops on both
    "adakv",
)
FIRST_FAR = {"gemfilter": 1}  # else 2, of 4


def model_of(attention: str = "sdpa") -> PreTrainedModel:
    return tiny_model("llama", seed=1, attn_implementation=attention)


def test_far_tensors_are_elsewhere() -> None:
    near = torch.arange(6.0).view(2, 3)
    with far_reachable():
        far = near.to(FAR)
        assert isinstance(far, Far)
        assert far.device == FAR
        assert torch.arange(3, device=far.device).device == FAR
        assert torch.equal((far * 2).to("cpu"), near * 2)
        with pytest.raises(RuntimeError, match="two devices"):
            far + near
        with pytest.raises(RuntimeError, match="two devices"):
            near.gather(1, torch.zeros(2, 1, dtype=torch.int64).to(FAR))


@pytest.mark.parametrize(
    ("name", "rows", "attention"),
    [(name, rows, "sdpa") for name in NAMES for rows in ((0,), (0, 1, 2))]
    + [("fastkv_tokens", (0, 1, 2), "eager")],
)
def test_layers_on_another_device_give_what_they_give_on_one(
    name: str, rows: tuple[int, ...], attention: str
) -> None:
    policy, first = METHODS[name][0], FIRST_FAR.get(name, 2)
    _, expected = run_conversation(model_of(attention), policy, rows)
    model = split_over_two_devices(model_of(attention), first)
    with far_reachable():
        store, found = run_conversation(model, policy, rows)
        for index, layer in enumerate(store.layers):
            held: list[Tensor | None] = [layer.keys, layer.values, layer.positions]
            assert [each is not None and each.device == FAR for each in held] == [
                index >= first
            ] * 3
    assert_alike(found, expected)  # attention is another function there


@pytest.mark.parametrize(
    ("name", "storage", "options"),
    [
        ("snapkv", PlainStorage(), {"prefill_chunk_size": 13}),
        ("h2o", PlainStorage(), {"prefill_chunk_size": 13}),
        ("fastkv_tokens", PlainStorage(), {"num_beams": 3}),
        ("fastkv_tokens", OffloadedStorage(), {}),
    ],
)
def test_chunks_beams_and_storage_on_another_device(
    name: str, storage: Storage, options: dict[str, Any]
) -> None:
    ids, mask = left_padded([random_tokens(0, 50), random_tokens(1, 31)])

    def tokens(model: PreTrainedModel) -> Tensor:
        found: Tensor = model.generate(
            ids,
            attention_mask=mask,
            cache=PolicyCache(METHODS[name][0], storage),
            max_new_tokens=8,
            do_sample=False,
            **options,
        )
        return found

    expected = tokens(model_of())
    model = split_over_two_devices(model_of(), first=2)
    with far_reachable():
        assert torch.equal(tokens(model), expected)


@pytest.mark.parametrize("first", [0, 2])
def test_a_saved_cache_goes_on_where_the_layers_are(tmp_path: Path, first: int) -> None:
    """In a turn whose mask makes padding of a row's last tokens, as after its end of text."""
    policy, _ = METHODS["fastkv_tokens"]
    ids, mask = left_padded([random_tokens(0, 50), random_tokens(1, 31)])
    added, added_mask = left_padded([random_tokens(2, 20), random_tokens(3, 11)])

    def turns(model: PreTrainedModel, path: Path) -> list[Tensor]:
        cache = PolicyCache(policy)
        said: Tensor = model.generate(
            ids, attention_mask=mask, cache=cache, max_new_tokens=6, do_sample=False
        )
        cache.save(path)
        ended = torch.ones(2, 6, dtype=mask.dtype)
        ended[1, 3:] = 0
        later = [
            model.generate(
                torch.cat([said, added], dim=1),
                attention_mask=torch.cat([mask, ended, added_mask], dim=1),
                cache=each,
                max_new_tokens=6,
                do_sample=False,
            )
            for each in (cache, PolicyCache.load(path))
        ]
        return [said, *later]

    expected = turns(model_of(), tmp_path / "one.safetensors")
    model = split_over_two_devices(model_of(), first)
    with far_reachable():
        found = turns(model, tmp_path / "two.safetensors")
    for tokens, wanted in zip(found, expected, strict=True):
        assert torch.equal(tokens, wanted)
