"""What layers remember of an answer: reordered, copied, saved, taken back, carried into turns."""

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
    TOVA,
    FullContext,
    GQAGroupSelector,
    PassAllPropagation,
    SnapKV,
    StreamingLLM,
    WindowMaxPoolScorer,
)
from tests.integrations.decoding.support import bounded, read
from tests.reference import VOCAB_SIZE, random_tokens, tiny_model

ROWS = [random_tokens(seed=1, length=40), random_tokens(seed=2, length=31)]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", seed=5)


def answer(steps: int, seed: int = 7, rows: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB_SIZE, (rows, steps), generator=generator)


@torch.no_grad()
def go_on(model: Any, cache: PolicyCache, forced: Tensor) -> Tensor:
    """Feeds columns one at a time; logits `[batch, steps, vocab]`."""
    assert cache._reader.tokens is not None
    mask, found = cache._reader.tokens.valid.long(), []
    with cache.attached(model):
        for column in forced.T:
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            output = model(column[:, None], attention_mask=mask, cache=cache)
            found.append(output.logits[:, -1])
    return torch.stack(found, dim=1)


def test_sums_go_on_over_turns(model: Any) -> None:
    """A second turn in the middle of an interval: the sums are those of every step by itself."""
    forced = answer(14, rows=1)
    question = torch.tensor([random_tokens(seed=3, length=12)])

    def sums(every: int) -> list[Tensor]:
        cache = read(model, bounded(H2O, 500, every), ROWS[:1], forced).cache
        cache.start_turn()
        with cache.attached(model), torch.no_grad():
            model(question, cache=cache)
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
        model.generate(torch.tensor([ROWS[0]]), cache=cache, prompt_lookup_num_tokens=3)


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
        assert str(SnapKV(decoding=64)) == "SnapKV(decoding=64, retention_rate=0.1)"
        composed = CachePolicy(
            WindowMaxPoolScorer(),
            GQAGroupSelector(),
            PassAllPropagation(),
            decoding=TOVA(decoding=9).decoding,
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
