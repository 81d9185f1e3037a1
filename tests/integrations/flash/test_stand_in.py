"""The stand-in itself: worked by hand, what it refuses, and Transformers' code around it."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, modeling_flash_attention_utils
from transformers.integrations.flash_attention import flash_attention_forward

from tests.integrations.flash.stand_in import (
    CALLS,
    PACKAGES,
    flash_2,
    flash_2_varlen,
    flash_4,
    flash_4_varlen,
    installed,
    pad_input,
    under_flash,
    unpad_input,
)
from tests.reference import tiny_model


def ones(*shape: int) -> Tensor:
    return torch.ones(shape)


def counted(query_len: int, key_len: int, **how: Any) -> list[list[float]]:
    """By query, the weight of each key: queries and keys are alike, values are unit vectors."""
    q, k, v = ones(1, query_len, 1, 8), ones(1, key_len, 1, 8), torch.eye(8)[None, :key_len, None]
    return flash_2(q, k, v, **how)[0, :, 0, :key_len].tolist()


def test_the_last_query_is_at_the_last_key() -> None:
    half, third = pytest.approx(1 / 2), pytest.approx(1 / 3)
    assert counted(2, 3, causal=True) == [[half, half, 0], [third, third, third]]
    assert counted(2, 3, causal=False) == [[third] * 3, [third] * 3]
    assert counted(3, 1, causal=True) == [[0], [0], [1]]  # two queries before every key


def test_a_window_counts_keys() -> None:
    half, third = pytest.approx(1 / 2), pytest.approx(1 / 3)
    assert counted(2, 4, causal=True, window_size=(1, 1)) == [
        [0, half, half, 0],
        [0, 0, half, half],
    ]
    assert counted(1, 4, causal=False, window_size=(1, 1)) == [[0, 0, half, half]]
    assert counted(2, 4, causal=False, window_size=(1, 1))[0] == [0, third, third, third]


def test_scores_are_scaled_then_capped_and_sinks_take_a_share() -> None:
    q, k = 2 * ones(1, 1, 1, 8), torch.stack([ones(1, 8), 0 * ones(1, 8)])[None]
    v = torch.stack([ones(1, 8), 0 * ones(1, 8)])[None]
    scores = torch.tensor([3 * torch.tanh(torch.tensor(16 * 0.25 / 3)), 0.0])
    found = flash_2(q, k, v, softmax_scale=0.25, softcap=3.0)
    assert found[0, 0, 0, 0] == pytest.approx(float(scores.softmax(dim=0)[0]))
    found, _ = flash_4(q, k, v, softmax_scale=0.25, learnable_sink=torch.tensor([1.0]))
    assert found[0, 0, 0, 0] == pytest.approx(float(torch.tensor([4.0, 0, 1]).softmax(dim=0)[0]))


def test_query_heads_share_the_keys_of_their_group() -> None:
    q, k = torch.randn(2, 3, 4, 8), torch.randn(2, 5, 2, 8)
    found = flash_2(q, k, k)
    for head in range(4):
        own = k[:, :, head // 2 : head // 2 + 1]
        alone = flash_2(q[:, :, head : head + 1], own, own)
        assert torch.allclose(found[:, :, head : head + 1], alone)


def test_sequences_do_not_see_each_other() -> None:
    q, k, v = torch.randn(5, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    ends = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([0, 6, 9], dtype=torch.int32)
    found = flash_2_varlen(q, k, v, *ends, 3, 6, causal=True)
    for own, seen in ((slice(0, 2), slice(0, 6)), (slice(2, 5), slice(6, 9))):
        alone = flash_2(q[None, own], k[None, seen], v[None, seen], causal=True)[0]
        assert torch.equal(found[own], alone)


@pytest.mark.parametrize(
    ("q", "k", "v", "message"),
    [
        (ones(1, 3, 4, 8), ones(1, 3, 3, 8), ones(1, 3, 3, 8), "heads of keys"),
        (ones(1, 3, 4, 8), ones(1, 3, 2, 8), ones(1, 4, 2, 8), "shapes do not fit"),
        (ones(1, 3, 4, 8), ones(1, 3, 2, 7), ones(1, 3, 2, 7), "shapes do not fit"),
        (ones(1, 4, 3, 8), ones(1, 2, 3, 8), ones(1, 3, 2, 8), "shapes do not fit"),
        (ones(2, 3, 4, 8), ones(1, 3, 2, 8), ones(1, 3, 2, 8), "as many rows"),
        (ones(3, 4, 8), ones(3, 2, 8), ones(3, 2, 8), "4 axes"),
        (ones(1, 3, 4, 8), ones(1, 3, 2, 8).half(), ones(1, 3, 2, 8), "fp16 or bf16"),
        (*(ones(1, 3, 2, 8).double(),) * 3, "fp16 or bf16"),
        (*(ones(1, 3, 2, 264),) * 3, "256 at most"),
    ],
)
def test_what_a_kernel_refuses(q: Tensor, k: Tensor, v: Tensor, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        flash_2(q, k, v)


@pytest.mark.parametrize(
    ("ends", "most"),
    [
        (torch.tensor([0, 2, 5]), 3),  # int64
        (torch.tensor([[0, 2, 5]], dtype=torch.int32), 3),
        (torch.tensor([0, 2, 4], dtype=torch.int32), 3),  # the last key is left out
        (torch.tensor([1, 2, 5], dtype=torch.int32), 3),
        (torch.tensor([0, 6, 5], dtype=torch.int32), 6),
        (torch.tensor([0, 2, 5], dtype=torch.int32), 2),  # a sequence is longer
        (torch.tensor([0, 5, 0, 2, 5], dtype=torch.int32)[::2], 5),
    ],
)
def test_wrong_limits_are_refused(ends: Tensor, most: int) -> None:
    right = torch.tensor([0, 2, 5], dtype=torch.int32)
    given = ones(5, 2, 8), ones(5, 2, 8), ones(5, 2, 8)
    flash_2_varlen(*given, right, right, 3, 3)
    with pytest.raises(RuntimeError, match="cu_seqlens must"):
        flash_2_varlen(*given, right, ends, 3, most)
    with pytest.raises(RuntimeError, match="cu_seqlens must"):
        flash_4_varlen(*given, ends, right, most, 3)
    with pytest.raises(ValueError, match="zip"):
        flash_2_varlen(*given, right, torch.tensor([0, 5], dtype=torch.int32), 3, 5)


def test_later_versions_pad_no_heads() -> None:
    with pytest.raises(RuntimeError, match="multiple of 8"):
        flash_4(ones(1, 3, 2, 12), ones(1, 3, 2, 12), ones(1, 3, 2, 12))
    flash_2(ones(1, 3, 2, 12), ones(1, 3, 2, 12), ones(1, 3, 2, 12))
    with pytest.raises(RuntimeError, match="sink for each head"):
        flash_4(*(ones(1, 3, 2, 8),) * 3, learnable_sink=ones(3))


def test_padding_comes_back_to_where_it_was() -> None:
    hidden, mask = torch.randn(2, 4, 3), torch.tensor([[0, 1, 1, 1], [0, 0, 0, 1]])
    tokens, indices, ends, longest, lengths = unpad_input(hidden, mask)
    assert (ends.tolist(), longest, lengths.tolist()) == ([0, 3, 4], 3, [3, 1])
    assert torch.equal(pad_input(tokens, indices, 2, 4), hidden * mask[:, :, None])
    with pytest.raises(RuntimeError, match="attention_mask must be"):
        unpad_input(hidden, mask[:, None, None])


@pytest.fixture
def model() -> PreTrainedModel:
    return under_flash(tiny_model("llama", seed=1, num_layers=1))


def through_transformers(model: Any, query_len: int, mask: Tensor | None) -> Tensor:
    """Attention by Transformers' own function, of 2 rows and 5 keys."""
    module = model.model.layers[0].self_attn
    q, k, v = torch.randn(2, 6, query_len, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    return flash_attention_forward(module, q, k, v, mask)[0]


@pytest.mark.parametrize("query_len", [1, 3, 5])
def test_transformers_takes_it_for_the_package(model: PreTrainedModel, query_len: int) -> None:
    found = through_transformers(model, query_len, None)
    assert found.shape == (2, query_len, 6, 8)
    assert CALLS == {"dense": 1}
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    found = through_transformers(model, query_len, mask)
    assert found.shape == (2, query_len, 6, 8)
    assert CALLS == {"dense": 1, "varlen": 1}


@pytest.mark.parametrize("query_len", [1, 3, 5])
def test_a_mask_of_queries_and_keys_is_refused(model: PreTrainedModel, query_len: int) -> None:
    with pytest.raises((RuntimeError, IndexError)):
        through_transformers(model, query_len, torch.ones(2, 1, query_len, 5, dtype=torch.bool))


def test_nothing_stays_behind(model: PreTrainedModel) -> None:
    side: Any = modeling_flash_attention_utils
    with installed():
        through_transformers(model, 1, None)
        assert side._loaded_implementation == "flash_attention_2"
        inner = sys.modules["flash_attn"]
    assert sys.modules["flash_attn"] is not inner  # that of the fixture around
    assert side._loaded_implementation is None
    assert side._flash_fn is None
    assert set(PACKAGES) <= set(sys.modules)
