"""What layers remember of an answer: reordered, copied, saved, taken back, carried into turns."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy import CachePolicy, DecodingEviction
from kvpolicy.errors import UnsupportedGenerationError
from kvpolicy.integrations.transformers import OffloadedStorage, PolicyCache, QuantizedStorage
from kvpolicy.policies import (
    H2O,
    RKV,
    TOVA,
    AccumulatedAttentionScorer,
    FullContext,
    GQAGroupSelector,
    PassAllPropagation,
    SnapKV,
    StreamingLLM,
    SumScorer,
    ValueAwareScorer,
    WindowMaxPoolScorer,
)
from tests.integrations.decoding.reading import held, padded, read
from tests.integrations.decoding.rules import RULES, bounded
from tests.reference import VOCAB_SIZE, random_tokens, tiny_model

ROWS = [random_tokens(seed=1, length=40), random_tokens(seed=2, length=31)]
COMBINED = FullContext(
    decoding=DecodingEviction(
        SumScorer([ValueAwareScorer(AccumulatedAttentionScorer()), WindowMaxPoolScorer(4)]),
        GQAGroupSelector(retention_tokens=24, window_size=4),
        every=9,
    )
)
POLICIES: dict[str, CachePolicy] = {
    name: bounded(method, 24, 9)
    for name, method in (("h2o", H2O), ("snapkv", SnapKV), ("r_kv", RKV), ("tova", TOVA))
} | {"combined": COMBINED, "window_of_20": bounded(SnapKV, 32, 9, window_size=20)}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", seed=5)


def answer(steps: int, seed: int = 7, rows: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB_SIZE, (rows, steps), generator=generator)


@torch.no_grad()
def go_on(model: Any, cache: PolicyCache, forced: Tensor) -> Tensor:
    """Feeds columns one at a time; logits `[batch, steps, vocab]`."""
    assert cache.reader.tokens is not None
    mask, found = cache.reader.tokens.valid.long(), []
    with cache.attached(model):
        for column in forced.T:
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            output = model(column[:, None], attention_mask=mask, past_key_values=cache)
            found.append(output.logits[:, -1])
    return torch.stack(found, dim=1)


@pytest.mark.parametrize("name", POLICIES)
def test_rows_that_are_reordered_take_what_they_remember_along(
    model: PreTrainedModel, name: str
) -> None:
    first, later = answer(23), answer(25, seed=8)
    cache = read(model, POLICIES[name], ROWS, first).cache
    cache.reorder_cache(torch.tensor([1, 1]))
    found = go_on(model, cache, later)
    alone = read(model, POLICIES[name], ROWS[1:], first[1:]).cache
    for row in range(2):
        other = copy.deepcopy(alone)
        want = go_on(model, other, later[row : row + 1])
        assert (found[row] - want[0]).abs().max() <= 1e-4
        assert held(cache, 2)[row] == held(other, 1)[0]


@pytest.mark.parametrize("name", POLICIES)
def test_copies_and_files_go_on_as_the_cache_does(
    model: PreTrainedModel, name: str, tmp_path: Path
) -> None:
    cache = read(model, POLICIES[name], ROWS, answer(23)).cache
    cache.save(tmp_path / "answer.safetensors")
    fork, later = copy.copy(cache), answer(25, seed=8)
    other = go_on(model, fork, answer(25, seed=9))  # goes its own way
    want = go_on(model, cache, later)
    loaded = PolicyCache.load(tmp_path / "answer.safetensors")
    assert loaded.policy == cache.policy
    assert torch.equal(go_on(model, loaded, later), want)
    assert held(loaded, 2) == held(cache, 2)
    assert str(loaded.report()) == str(cache.report())
    assert not torch.equal(other, want)


@pytest.mark.parametrize("name", POLICIES)
def test_what_was_taken_back_was_never_there(model: PreTrainedModel, name: str) -> None:
    policy = POLICIES[name]
    assert policy.decoding is not None
    every = policy.decoding.every
    cache = read(model, policy, ROWS, answer(every * 2)).cache
    with pytest.raises(ValueError, match="only 0 tokens were appended"):
        cache.crop(-1)
    if every == 1:
        return
    want = go_on(model, copy.deepcopy(cache), answer(20, seed=8))
    go_on(model, cache, answer(1, seed=9))
    cache.crop(-1)
    assert torch.equal(go_on(model, cache, answer(20, seed=8)), want)


@pytest.mark.parametrize("name", POLICIES)
def test_a_forward_that_fails_changes_nothing(model: PreTrainedModel, name: str) -> None:
    cache = read(model, POLICIES[name], ROWS, answer(17)).cache  # the next token lets layers choose
    before, report = held(cache, 2), str(cache.report())

    def fail(*args: Any) -> None:
        raise RuntimeError("out of memory")

    handle = model.get_submodule("model.layers.2.mlp").register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        go_on(model, cache, answer(1, seed=8))
    handle.remove()
    assert held(cache, 2) == before
    assert str(cache.report()) == report
    whole = read(model, POLICIES[name], ROWS, torch.cat([answer(17), answer(20, seed=8)], dim=1))
    assert torch.equal(go_on(model, cache, answer(20, seed=8)), whole.logits[:, 17:])


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("beams", [1, 3])
def test_rows_of_a_batch_say_what_they_say_alone(model: Any, name: str, beams: int) -> None:
    """Over two turns, the second in the middle of an interval."""
    how = {"max_new_tokens": 25, "do_sample": False, "num_beams": beams}
    ids, mask = padded(ROWS)
    cache = PolicyCache(POLICIES[name])
    said = model.generate(ids, attention_mask=mask, past_key_values=cache, **how)
    assert max(layer.kept_len for layer in cache.layers) <= 32 + 9
    alone, cache_alone = padded(ROWS[1:])[0], PolicyCache(POLICIES[name])
    said_alone = model.generate(alone, past_key_values=cache_alone, **how)
    assert torch.equal(said[1, ids.shape[1] :], said_alone[0, alone.shape[1] :])
    if beams > 1:
        return
    question = torch.tensor([random_tokens(seed=3, length=12)])
    mask = torch.cat([mask, torch.ones(2, 25 + 12, dtype=mask.dtype)], dim=1)
    whole = torch.cat([said, question.expand(2, -1)], dim=1)
    again = model.generate(whole, attention_mask=mask, past_key_values=cache, **how)
    whole_alone = torch.cat([said_alone, question], dim=1)
    again_alone = model.generate(whole_alone, past_key_values=cache_alone, **how)
    assert torch.equal(again[1, whole.shape[1] :], again_alone[0, whole_alone.shape[1] :])
    assert held(cache, 2)[1] == held(cache_alone, 1)[0]


def test_sums_go_on_over_turns(model: Any) -> None:
    """A second turn in the middle of an interval: the sums are those of every step by itself."""
    forced = answer(14, rows=1)
    question = torch.tensor([random_tokens(seed=3, length=12)])

    def sums(every: int) -> list[Tensor]:
        cache = read(model, bounded(H2O, 500, every), ROWS[:1], forced).cache
        cache.start_turn()
        with cache.attached(model), torch.no_grad():
            model(question, past_key_values=cache)
        go_on(model, cache, answer(10, seed=8, rows=1))
        return [each for layer in cache.layers if (each := layer.observed.carried) is not None]

    seldom, often = sums(10), sums(1)
    assert len(seldom) == len(often) == 4
    for a, b in zip(seldom, often, strict=True):
        assert a.shape == b.shape
        assert torch.allclose(a, b, atol=1e-4)


@pytest.mark.parametrize("storage", [OffloadedStorage(), QuantizedStorage(q_group_size=8)])
def test_other_storages_choose_the_same_number(model: PreTrainedModel, storage: Any) -> None:
    cache = PolicyCache(bounded(H2O, 24, 9), storage)
    found = read(model, cache, ROWS, answer(40))
    assert found.most[0] == 40 + 8
    assert all(layer.kept_len == 24 + 40 % 9 for layer in cache.layers)


def test_drafts_are_refused_by_name(model: Any) -> None:
    cache = PolicyCache(bounded(SnapKV))
    with pytest.raises(UnsupportedGenerationError, match="evicts while it decodes"):
        model.generate(torch.tensor([ROWS[0]]), past_key_values=cache, prompt_lookup_num_tokens=3)


@pytest.mark.parametrize("name", RULES)
def test_a_prompt_in_chunks_is_remembered_whole(model: Any, name: str) -> None:
    ids = torch.tensor([ROWS[0]])
    whole, chunked = PolicyCache(RULES[name][0]), PolicyCache(RULES[name][0])
    how = {"max_new_tokens": 60, "do_sample": False}
    said = model.generate(ids, past_key_values=whole, **how)
    assert torch.equal(
        model.generate(ids, past_key_values=chunked, prefill_chunk_size=13, **how), said
    )
    assert held(whole, 1) == held(chunked, 1)


def test_the_bound_holds_in_bytes(model: PreTrainedModel) -> None:
    """What buffers hold is the budget and one interval; the rest is some queries and sums."""
    policy = H2O(retention_tokens=32, decoding=True)
    cache = PolicyCache(policy)
    found = read(model, cache, ROWS[:1], answer(700, rows=1))
    report = cache.report()
    slot = 2 * 2 * 8 * 4  # keys and values, two heads, float32
    assert max(found.most) <= 32 + 128
    for layer, of_layer in zip(cache.layers, report.layers, strict=True):
        assert layer.capacity <= 32 + 128
        assert layer.nbytes() == layer.capacity * slot
        assert of_layer.held_bytes == layer.kept_len * slot
        assert of_layer.full_bytes == 740 * slot
        assert of_layer.observed_bytes == layer.observed.nbytes() <= 128 * 6 * 8 * 4 + 32 * 2 * 4
    assert "bytes of queries and sums" in str(report)


class TestDescription:
    def test_two_policies_are_equal_where_their_decoding_is(self) -> None:
        assert SnapKV(retention_tokens=64, decoding=True) == SnapKV(
            retention_tokens=64, decoding=64
        )
        assert SnapKV(decoding=64) != SnapKV()
        assert str(SnapKV(decoding=64)) == "SnapKV(decoding=64)"
        composed = CachePolicy(
            WindowMaxPoolScorer(),
            GQAGroupSelector(),
            PassAllPropagation(),
            TOVA(decoding=9).decoding,
        )
        assert "decoding=DecodingEviction(LastQueryScorer()" in str(composed).replace("scorer=", "")

    def test_a_file_of_another_bound_is_refused(
        self, model: PreTrainedModel, tmp_path: Path
    ) -> None:
        cache = read(model, bounded(H2O, 24), ROWS, answer(5)).cache
        cache.save(tmp_path / "answer.safetensors")
        with pytest.raises(ValueError, match="must be the one that filled the cache"):
            PolicyCache.load(tmp_path / "answer.safetensors", bounded(H2O, 25))

    @pytest.mark.parametrize("method", [FullContext, StreamingLLM])
    def test_a_rate_is_no_bound(self, method: Any) -> None:
        with pytest.raises(ValueError, match="budget in tokens"):
            method(decoding=DecodingEviction(None, GQAGroupSelector(0.2)))
        with pytest.raises(ValueError, match="retention_tokens must be given|has no budget"):
            method(decoding=True)
