"""Attention of one token to what is held without padding: in plain loops, and in models."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers import OffloadedStorage, PlainStorage, PolicyCache
from kvpolicy.integrations.transformers.forward import attending, layer_masks, packed_attention
from kvpolicy.integrations.transformers.model import routing
from kvpolicy.integrations.transformers.state.packed import Packed
from kvpolicy.policies import AdaKV, FullContext
from tests.integrations.support.conversation import left_padded
from tests.reference import random_tokens, tiny_model


def in_loops(query: Tensor, held: Packed, scaling: float) -> Tensor:
    """Row by row, head by head, token by token, from what the layer would show a user."""
    keys, values = held.read()
    batch, query_heads = query.shape[:2]
    group = query_heads // keys.shape[1]
    output = torch.zeros(batch, 1, query_heads, values.shape[3])
    for row in range(batch):
        for head in range(query_heads):
            own = head // group
            padding = held.width - held.counts[row * keys.shape[1] + own]
            slots = range(padding, keys.shape[2])
            weights = [
                math.exp(float(query[row, head, 0] @ keys[row, own, slot]) * scaling)
                for slot in slots
            ]
            for weight, slot in zip(weights, slots, strict=True):
                output[row, 0, head] += weight / sum(weights) * values[row, own, slot]
    return output


@given(
    counts=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), min_size=1, max_size=3),
    appended=st.integers(1, 3),
    group=st.sampled_from([1, 3]),
    seed=st.integers(0, 2**16),
)
def test_against_loops(counts: list[tuple[int, int]], appended: int, group: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    batch, width = len(counts), max(map(max, counts))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random) * 2  # attention is peaked

    kept = torch.full((batch, 2, width), -1)
    for row, heads in enumerate(counts):
        for head, count in enumerate(heads):
            kept[row, head, width - count :] = torch.arange(count)
    held: Any = Packed.of(PlainStorage(), normal(batch, 2, 7, 5), normal(batch, 2, 7, 3), kept)
    held = held.appended(normal(batch, 2, appended, 5), normal(batch, 2, appended, 3))
    query = normal(batch, 2 * group, 1, 5)
    got = packed_attention.packed_attention(query, held, 0.7)
    assert torch.allclose(got, in_loops(query, held, 0.7), atol=1e-5)
    own = packed_attention.packed_attention(query, held, None)
    assert torch.allclose(own, in_loops(query, held, 5**-0.5), atol=1e-5)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Layers that have attended to what is packed, each with its entries."""
    found: list[int] = []

    def counting(query: Tensor, held: Packed, scaling: float | None) -> Tensor:
        found.append(held.slots)
        return packed_attention.packed_attention(query, held, scaling)

    monkeypatch.setattr(attending, "packed_attention", counting)
    return found


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Packed]:
    """What was unpacked."""
    found: list[Packed] = []
    read = Packed.read

    def counting(held: Packed) -> tuple[Tensor, Tensor]:
        found.append(held)
        return read(held)

    monkeypatch.setattr(Packed, "read", counting)
    return found


def decoded(model: PreTrainedModel, cache: PolicyCache, lengths: tuple[int, ...]) -> Tensor:
    """Logits ``[steps, batch, vocab]`` of a few tokens behind rows padded on the left."""
    ids, mask = left_padded([random_tokens(row, length) for row, length in enumerate(lengths)])
    logits = []
    with torch.no_grad(), cache.attached(model):
        model(ids, attention_mask=mask, cache=cache)
        for step in range(20):
            token = torch.full((len(lengths), 1), 3 + step)
            mask = torch.cat([mask, torch.ones_like(token)], dim=1)
            output = model(token, attention_mask=mask, cache=cache)
            logits.append(output.logits[:, -1])
    return torch.stack(logits)


CASES = {
    "heads": (AdaKV(0.3, window_size=4), (50,)),
    "heads and rows": (AdaKV(0.3, window_size=4), (50, 20, 33)),
    "rows": (FullContext(), (50, 20)),
}


@pytest.mark.parametrize("storage", [PlainStorage(), OffloadedStorage()], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_decoding_unpacks_nothing_and_is_that_of_padded_tensors(
    model: PreTrainedModel,
    name: str,
    storage: Any,
    calls: list[int],
    reads: list[Packed],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy, lengths = CASES[name]
    cache = PolicyCache(policy, storage)
    got = decoded(model, cache, lengths)
    packed = [layer.held for layer in cache.layers if isinstance(layer.held, Packed)]
    assert len(packed) >= 2
    assert len(calls) == 20 * len(packed)
    assert not reads
    monkeypatch.setattr(layer_masks, "may_attend", lambda held: False)
    unpacking = decoded(model, PolicyCache(policy, storage), lengths)
    assert len(calls) == 20 * len(packed)
    assert len(reads) == 20 * len(packed)
    assert torch.allclose(got, unpacking, atol=1e-4)
    monkeypatch.setattr(type(cache.layers[0]), "_packs", lambda *_: False)
    assert torch.allclose(got, decoded(model, PolicyCache(policy), lengths), atol=1e-4)


def test_another_function_gets_all_keys_and_a_mask(
    model: PreTrainedModel, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that computes the same under the name, of which nothing else is known."""
    policy, lengths = CASES["heads and rows"]
    expected = decoded(model, PolicyCache(policy), lengths)
    before = len(calls)
    masks = []

    def own(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **how: Any) -> Any:
        masks.append(mask)
        return sdpa_attention_forward(module, query, key, value, mask, **how)

    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", own)
    got = decoded(model, PolicyCache(policy), lengths)
    assert len(calls) == before > 0
    assert all(mask is not None for mask in masks[4:])
    assert torch.allclose(got, expected, atol=1e-4)


def test_a_layer_that_computes_with_its_keys_gets_them(
    model: PreTrainedModel, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it makes of them, its attention function is given other tensors then."""
    policy, lengths = CASES["heads"]
    expected = decoded(model, PolicyCache(policy), lengths)
    before, update = len(calls), PolicyCache.update

    def doubled(self: PolicyCache, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = update(self, *args, **kwargs)
        return keys * 1, values

    monkeypatch.setattr(PolicyCache, "update", doubled)
    cache = PolicyCache(policy)
    ids = torch.tensor([random_tokens(0, 50)])
    logits = []
    with torch.no_grad(), cache.attached(model):
        model(ids, cache=cache)
        monkeypatch.setattr(PolicyCache, "update", doubled)
        for step in range(20):
            token = torch.full((1, 1), 3 + step)
            logits.append(model(token, cache=cache).logits[:, -1])
    assert len(calls) == before > 0
    assert torch.allclose(torch.stack(logits), expected, atol=1e-4)


def test_a_layer_that_attends_in_a_way_of_its_own_is_refused(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = PolicyCache(AdaKV(0.3, window_size=4))
    ids = torch.tensor([random_tokens(0, 50)])
    with torch.no_grad(), cache.attached(model):
        model(ids, cache=cache)
        monkeypatch.setattr(routing, "_made_of", lambda *_: False)
        with pytest.raises(
            UnsupportedModelError,
            match="model must give an attention function the keys of the cache",
        ):
            model(ids[:, :1], cache=cache)
    monkeypatch.undo()
    assert cache.get_seq_length() == 50
    with torch.no_grad(), cache.attached(model):
        assert model(ids[:, :1], cache=cache).logits.isfinite().all()


def test_with_gradients_it_is_unpacked(model: PreTrainedModel, calls: list[int]) -> None:
    cache = PolicyCache(AdaKV(0.3, window_size=4))
    ids = torch.tensor([random_tokens(0, 50)])
    with cache.attached(model):
        with torch.no_grad():
            model(ids, cache=cache)
        logits = model(ids[:, :1], cache=cache).logits
    assert not calls
    assert logits.requires_grad


def test_other_implementations_unpack(model: PreTrainedModel, calls: list[int]) -> None:
    policy, lengths = CASES["heads and rows"]
    expected = decoded(model, PolicyCache(policy), lengths)
    before = len(calls)
    other = tiny_model("llama", seed=1, attn_implementation="eager")
    got = decoded(other, PolicyCache(policy), lengths)
    assert len(calls) == before > 0
    assert torch.allclose(got, expected, atol=1e-4)


def test_in_inference_mode(model: PreTrainedModel, calls: list[int]) -> None:
    policy, lengths = CASES["heads"]
    expected = decoded(model, PolicyCache(policy), lengths)
    before = len(calls)
    with torch.inference_mode():
        got = decoded(model, PolicyCache(policy), lengths)
    assert len(calls) == 2 * before > 0
    assert torch.allclose(got, expected, atol=1e-5)


def test_what_stands_for_keys_is_like_them() -> None:
    keys = torch.randn(1, 2, 7, 4)
    held = Packed.of(PlainStorage(), keys, keys[..., :3], torch.tensor([[[0, 3], [-1, 5]]]))
    standing = packed_attention.Unpacked.pair(held)
    for one, other in zip(standing, held.read(), strict=True):
        assert (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        assert torch.equal(one + 0, other)
        assert torch.equal(one[:, :, 1:], other[:, :, 1:])
        assert type(torch.cat([one, other])) is Tensor
