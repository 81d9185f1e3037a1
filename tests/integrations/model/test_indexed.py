"""Layers with an indexer: what is held beside keys and values, and what the indexer picks among.

Every family of `make families` is held against its own code on what a layer holds there; here are
two turns against the same, and what else a cache has to do with index keys.
"""

from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvpolicy import CachePolicy
from kvpolicy.errors import NotAttachedError, UnsupportedModelError
from kvpolicy.integrations.transformers import OffloadedStorage, PolicyCache
from kvpolicy.integrations.transformers.model.parts import ModelParts
from kvpolicy.integrations.transformers.state.indexed import IndexedLayer
from kvpolicy.integrations.transformers.surface import CACHE
from kvpolicy.policies import AdaKV, FastKV, FullContext, SnapKV, StreamingLLM
from tests.integrations.hybrids.models import apart, generate, tokens
from tests.integrations.model.builds.catalogue import Build, builds, built
from tests.integrations.support.alone import read_two_turns
from tests.integrations.support.conversation import left_padded
from tests.integrations.support.versions import OLD

# An indexer in every layer; in every other, whose slots the next borrows; among sliding windows;
# of blocks of tokens, turned to their positions late; of blocks, told what is padding by a mask; of
# blocks of slots beside layers without.
FAMILY_NAMES = tuple(
    name
    for name in (
        "deepseek_v32",
        "hy_v4",
        "dots3_note_text",
        "qwen4_exp_text",
        "glm5_next",
        "minimax_m3_vl_text_sparse",
    )
    if name in builds() and not (OLD and name == "qwen4_exp_text")  # refused: see its cache
)
STATES = ("qwen4_exp_text", "glm5_next")  # from which no token can be taken back
BLOCKS = ("minimax_m3_vl_text_sparse",)  # of slots, which the model counts with padding
if not FAMILY_NAMES:
    pytest.skip("Transformers has no indexers yet", allow_module_level=True)
ROWS = [tokens(0, 47), tokens(1, 31)]
POLICIES: dict[str, CachePolicy] = {
    "snapkv": SnapKV(0.35, window_size=4),
    "adakv": AdaKV(0.35, window_size=4),
    "fastkv": FastKV(tsp_rate=0.6, retention_rate=0.35, window_size=4),
    "full_context": FullContext(),
}
SNAPKV = POLICIES["snapkv"]
TOLERANCE = 1e-4


def indexed(store: PolicyCache) -> dict[int, IndexedLayer]:
    """The layers that have index keys of their own."""
    return {
        index: layer
        for index, layer in enumerate(store.layers)
        if isinstance(layer, IndexedLayer) and layer.index is not None
    }


def held(store: PolicyCache) -> list[Tensor]:
    """All that is held of tokens."""
    found: list[Tensor] = []
    for layer in store.layers:
        if layer.positions is not None:
            there = (layer.positions >= 0)[..., None]
            found += [layer.positions, layer.keys * there, layer.values * there]
    for layer in indexed(store).values():
        keys, beside = layer.index.read()
        assert keys.shape[:3] == (len(layer.positions), 1, layer.kept_len)
        found += [each * (layer.positions >= 0)[..., None] for each in (keys, beside)]
    return found


def assert_same(one: PolicyCache, other: PolicyCache) -> None:
    pairs = list(zip(held(one), held(other), strict=True))
    # Sums in another order, as in chunks, differ by some 2e-5 in the later layers.
    assert all(torch.allclose(a, b, atol=5e-5) for a, b in pairs)


def rows_of(name: str) -> list[list[int]]:
    """Two prompts, the second of them padded where the model can be given one."""
    return [ROWS[0], tokens(1, 47)] if name in BLOCKS else ROWS


@pytest.mark.parametrize("policy", ["snapkv", "full_context"])
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_two_turns_against_the_models_own_code(name: str, policy: str) -> None:
    """Every layer run anew on what it held: of what was evicted nothing is picked."""
    turns = (19, 11) if name not in (*STATES, *BLOCKS) else (19, 19)  # no state skips padding
    read_two_turns(built(name), POLICIES[policy], [*map(len, rows_of(name))], turns)


@pytest.mark.parametrize("storage", [None, OffloadedStorage()])
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_index_keys_are_those_of_the_tokens_kept(name: str, storage: Any) -> None:
    """And count in the report, as held and as what a full cache would hold."""
    model, ids = built(name), torch.tensor(ROWS[:1])
    own, store = (
        DynamicCache(config=model.config),
        PolicyCache(StreamingLLM(retention_tokens=10), storage),
    )
    with torch.no_grad():
        model(ids, **{CACHE: own})
        with store.attached(model):
            model(ids, **{CACHE: store})
    assert indexed(store)
    chosen = [*range(4), *range(41, 47)]
    for index, layer in indexed(store).items():
        full, line = own.layers[index], store.report().layers[index]
        of_full = full.idx_keys[:, 0] if name in BLOCKS else full.indexer_keys
        keys, places = layer.index.read()
        assert layer.positions.tolist() == [[chosen]]
        torch.testing.assert_close(keys[:, 0], of_full[:, chosen])
        if places.shape[3]:
            assert places[0, 0].tolist() == [[place] * places.shape[3] for place in chosen]
        beside = keys.nbytes + places.nbytes
        assert line.held_bytes == layer.keys.nbytes + layer.values.nbytes + beside
        assert line.full_bytes == full.keys.nbytes + full.values.nbytes + beside * 47 // 10


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_beams_are_the_models_own(name: str) -> None:
    model = built(name)
    own = DynamicCache(config=model.get_decoder().config)
    want, _ = generate(model, own, *left_padded(rows_of(name)), num_beams=3)
    found, _ = generate(model, PolicyCache(FullContext()), *left_padded(rows_of(name)), num_beams=3)
    assert torch.equal(found, want)


# Whose indexers pick `index_topk` of all keys that there are, hidden ones last.
OF_ALL_KEYS = tuple(name for name in ("deepseek_v32", "glm_moe_dsa") if name in builds())


@cache
def of_one_head(name: str) -> PreTrainedModel:
    """A model whose indexer has one head: where its product is negative a key's score is 0."""
    kind = builds()[name]
    return Build(name, kind.model_type, {**kind.patch, "index_n_heads": 1}).model()


@torch.no_grad()
def logits_of(model: PreTrainedModel, store: Any, chunk: int) -> Tensor:
    ids = torch.tensor(ROWS[:1])
    attached = store.attached(model) if isinstance(store, PolicyCache) else nullcontext()
    with attached:
        if isinstance(store, PolicyCache):
            store.start_turn(prompt_len=ids.shape[1])
        outputs = [model(each, **{CACHE: store}) for each in ids.split(chunk, dim=1)]
    return torch.cat([each.logits for each in outputs], dim=1)


@pytest.mark.parametrize("chunk", [1, 16])
@pytest.mark.parametrize("name", OF_ALL_KEYS)
def test_chunks_pick_others_of_equal_keys_as_the_models_own_do(name: str, chunk: int) -> None:
    """`torch.topk` takes whichever of them, by how many keys there are: with any cache."""
    model = of_one_head(name)
    own = [logits_of(model, DynamicCache(config=model.config), each) for each in (47, chunk)]
    found = [logits_of(model, PolicyCache(FullContext()), each) for each in (47, chunk)]
    assert apart(own[1], own[0]) > 1e-1
    assert apart(found[0], own[0]) < TOLERANCE
    assert apart(found[1], own[1]) < TOLERANCE


def first_of_equals(values: Tensor, k: int, dim: int = -1, **_: Any) -> Any:
    """As `Tensor.topk`, which promises no order among equals: the earlier first."""
    found = values.sort(dim=dim, descending=True, stable=True)
    return torch.return_types.topk([each.narrow(dim, 0, k) for each in found])


@pytest.mark.parametrize("chunk", [1, 16])
@pytest.mark.parametrize("policy", ["full_context", "snapkv"])
@pytest.mark.parametrize("name", OF_ALL_KEYS)
def test_chunks_change_nothing_where_equals_have_an_order(
    name: str, policy: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, stores = of_one_head(name), [PolicyCache(POLICIES[policy]) for _ in range(2)]
    monkeypatch.setattr(Tensor, "topk", first_of_equals)
    want = logits_of(model, stores[0], 47)
    assert apart(logits_of(model, stores[1], chunk)[:, -1], want[:, -1]) < TOLERANCE
    assert_same(*stores)


@torch.no_grad()
@pytest.mark.parametrize("implementation", [None, "eager"], ids=["its own", "eager"])
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_plain_calls_while_a_cache_is_attached(name: str, implementation: str | None) -> None:
    """What an indexer picks is applied as ever."""
    model, ids = builds()[name].model(attn_implementation=implementation), torch.tensor(ROWS[:1])
    own = DynamicCache(config=model.config)
    want = model(ids, use_cache=False).logits
    with PolicyCache(SNAPKV).attached(model):
        assert torch.equal(model(ids, use_cache=False).logits, want)
        found = [model(each, **{CACHE: own}).logits for each in (ids[:, :40], ids[:, 40:])]
    torch.testing.assert_close(torch.cat(found, dim=1), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [name for name in FAMILY_NAMES if name != "qwen4_exp_text"])
def test_a_cache_that_is_not_attached(name: str) -> None:
    with pytest.raises(NotAttachedError, match="cache must be attached"):
        built(name)(torch.tensor(ROWS[:1]), **{CACHE: PolicyCache(SNAPKV)})


@pytest.mark.skipif("hy_v4" not in FAMILY_NAMES, reason="no such model yet")
def test_layers_that_borrow_slots_keep_what_the_lender_keeps() -> None:
    model, store = built("hy_v4"), PolicyCache(SNAPKV)
    assert model.config.indexer_types == ["full", "shared"] * 2
    assert ModelParts(model).eligible == [1, 3]
    generate(model, store, *left_padded(ROWS))
    assert list(indexed(store)) == [0, 2]
    assert torch.equal(store.layers[0].positions, store.layers[1].positions)
    assert torch.equal(store.layers[2].positions, store.layers[3].positions)
    assert not torch.equal(store.layers[0].positions, store.layers[2].positions)


@pytest.mark.parametrize("name", [name for name in BLOCKS if name in FAMILY_NAMES])
def test_rows_are_not_padded_where_blocks_are_counted_with_padding(name: str) -> None:
    """By the model, with any cache."""
    store = PolicyCache(SNAPKV)
    with pytest.raises(UnsupportedModelError, match="rows must not be padded with MiniMaxM3"):
        generate(built(name), store, *left_padded(ROWS))
    assert store.get_seq_length() == 0


@pytest.mark.skipif(not OLD, reason="this Transformers' cache holds those positions")
def test_index_keys_whose_positions_the_cache_does_not_hold() -> None:
    model, cache = builds()["qwen4_exp_text"].model(), PolicyCache(SNAPKV)
    with pytest.raises(UnsupportedModelError, match="with an indexer|DynamicIndexedLayer"):
        generate(model, cache, torch.tensor(ROWS[:1]))
    assert cache.get_seq_length() == 0
