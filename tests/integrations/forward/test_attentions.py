"""Attentions that are asked for have the columns of the input wherever nothing was evicted."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvpolicy.integrations.transformers import PolicyCache, QuantizedStorage
from kvpolicy.integrations.transformers.surface import CACHE
from kvpolicy.policies import FastKV, FullContext, SnapKV
from tests.integrations.support.conversation import left_padded
from tests.reference import random_tokens, tiny_model

ASKED = {"output_attentions": True, "return_dict_in_generate": True, "output_logits": True}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("llama", seed=1, attn_implementation="eager")


def generate(model: PreTrainedModel, cache: Any, ids: Tensor, mask: Tensor, **how: Any) -> Any:
    return model.generate(
        ids, attention_mask=mask, **{CACHE: cache}, max_new_tokens=5, do_sample=False, **how
    )


def attentions_of(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """Of one forward over all, without a cache, each row's tokens at the positions it has alone."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        output = model(ids, attention_mask=mask, position_ids=positions, output_attentions=True)
    found: tuple[Tensor, ...] = output.attentions
    return found


def check(got: tuple[Tensor, ...], ids: Tensor, mask: Tensor, want: tuple[Tensor, ...]) -> None:
    """Compare the last queries, on what is no padding."""
    for one, other in zip(got, want, strict=True):
        batch, heads, queries, columns = one.shape
        assert (batch, heads, columns) == (*other.shape[:2], other.shape[3])
        real = mask[:, -queries:].bool()
        one, other = one.transpose(1, 2)[real], other[:, :, -queries:].transpose(1, 2)[real]
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


# Each row's padding first; one in which all rows have some; one with padding among tokens.
MASKS = {
    "left": torch.tensor([[1] * 9, [0] * 4 + [1] * 5]),
    "all": torch.tensor([[0] * 3 + [1] * 6, [0] * 5 + [1] * 4]),
    "between": torch.tensor([[1] * 9, [0, 1, 1, 0, 0, 1, 0, 1, 1]]),
    "none": torch.ones(2, 9, dtype=torch.int64),
}


@pytest.mark.parametrize(
    "policy", [FullContext(), SnapKV(1.0), FastKV(tsp_rate=1.0, retention_rate=1.0)]
)
@pytest.mark.parametrize("where", MASKS)
def test_where_nothing_is_evicted(model: PreTrainedModel, where: str, policy: Any) -> None:
    cache, mask = PolicyCache(policy), MASKS[where]
    ids = torch.tensor([random_tokens(0, 9), random_tokens(1, 9)])
    for turn in range(2):
        output = generate(model, cache, ids, mask, **ASKED)
        whole = output.sequences
        longer = torch.cat([mask, torch.ones(2, 5, dtype=mask.dtype)], dim=1)
        for step, got in enumerate(output.attentions):
            end = ids.shape[1] + step
            want = attentions_of(model, whole[:, :end], longer[:, :end])
            assert got[0].shape[-1] == end
            check(got, whole[:, :end], longer[:, :end], want)
        added, added_mask = left_padded([random_tokens(2 + turn, 3), random_tokens(4, 6)])
        ids, mask = torch.cat([whole, added], dim=1), torch.cat([longer, added_mask], dim=1)


def test_as_of_a_cache_of_transformers(model: PreTrainedModel) -> None:
    ids, mask = torch.tensor([random_tokens(0, 8)] * 2), MASKS["all"][:, :8]
    for cache in (
        PolicyCache(FullContext()),
        PolicyCache(FullContext(), QuantizedStorage(nbits=4, q_group_size=8)),
    ):
        got = generate(model, cache, ids, mask, **ASKED).attentions
        want = generate(model, DynamicCache(), ids, mask, **ASKED).attentions
        for one, other in zip(got, want, strict=True):
            assert [each.shape for each in one] == [each.shape for each in other]


@torch.no_grad()
@pytest.mark.parametrize("named", [False, True])
def test_by_hand_and_in_chunks(model: PreTrainedModel, named: bool) -> None:
    cache, mask = PolicyCache(FullContext()), MASKS["all"]
    ids = torch.tensor([random_tokens(0, 9), random_tokens(1, 9)])
    want = attentions_of(model, ids, mask)
    cache.start_turn(prompt_len=8)
    with cache.attached(model):
        for start, end in ((0, 5), (5, 8), (8, 9)):
            output = model(
                ids[:, start:end],
                attention_mask=mask[:, :end],
                cache=cache,
                output_attentions=True,
                return_dict=named,
            )
            got = output.attentions if named else output[-1]
            check(got, ids, mask[:, :end], tuple(each[:, :, :end, :end] for each in want))


def test_where_something_is_evicted_columns_are_what_is_held(model: PreTrainedModel) -> None:
    ids, mask = left_padded([random_tokens(0, 40), random_tokens(1, 25)])
    cache = PolicyCache(SnapKV(0.3))
    output = generate(model, cache, ids, mask, **ASKED)
    assert [each.shape[-1] for each in output.attentions[0]] == [40] * 4  # all is there yet
    for layer, attention in zip(cache.layers, output.attentions[-1], strict=True):
        assert attention.shape == (2, 6, 1, 12 + 4)
        assert layer.positions.shape == (2, 2, 12 + 4)
        empty = (layer.positions < 0).repeat_interleave(3, dim=1)
        assert bool(empty.any())
        assert bool((attention[:, :, 0][empty] == 0).all())
        torch.testing.assert_close(attention.sum(dim=-1), torch.ones(2, 6, 1))
