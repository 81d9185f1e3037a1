"""The stand-in itself: what it refuses, and Transformers' code around it.

That it computes what the packages compute is shown by all comparisons with sdpa.
"""

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
    installed,
    kernel,
    pad_input,
    under_flash,
    unpad_input,
)
from tests.reference import tiny_model

flash_2, flash_4 = kernel(2), kernel(4)
flash_2_varlen, flash_4_varlen = kernel(2, varlen=True), kernel(4, varlen=True)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape)


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
