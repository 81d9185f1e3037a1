"""flex_attention and flash attention: the masks each wants, and the same results."""

import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from kvpolicy import CachePolicy
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import AdaKV, FastKV, FullContext, GemFilter, PyramidInfer, SnapKV
from tests.families import FAMILIES
from tests.integrations.support.conversation import left_padded
from tests.reference import random_tokens, tiny_model

POLICIES: dict[str, CachePolicy] = {
    "full_context": FullContext(),
    "snapkv": SnapKV(0.4),
    "fastkv": FastKV(tsp_rate=0.5, retention_rate=0.3),
    "gemfilter": GemFilter(retention_rate=0.4),
    "pyramidinfer": PyramidInfer(recent_rate=0.1, decay_ratio=0.3, min_context=3),
}


@torch.no_grad()
def run(model: PreTrainedModel, policy: CachePolicy, padded: bool) -> list[Tensor]:
    """Logits of two turns, three tokens decoded in each."""
    rows = [random_tokens(0, 60), random_tokens(1, 43)][: 1 + padded]
    ids, mask = left_padded(rows)
    cache = PolicyCache(policy)
    logits = []
    with cache.attached(model):
        for turn in range(2):
            if turn:
                cache.start_turn()
                added = [random_tokens(5, 30), random_tokens(6, 12)][: 1 + padded]
                ids, new_mask = left_padded(added)
                mask = torch.cat([mask, new_mask], dim=1)
            for _ in range(3):
                output = model(ids, attention_mask=mask, cache=cache, logits_to_keep=1)
                logits.append(output.logits[:, -1])
                ids = torch.full((len(rows), 1), 3)
                mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
            mask = mask[:, :-1]
    return logits


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-4)


@contextmanager
def uncompiled() -> Iterator[None]:
    """flex_attention by its Python code, which takes seconds where compiling takes minutes."""
    torch.compiler.set_stance("force_eager")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.compiler.set_stance("default")


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", [*POLICIES, "adakv"])
def test_flex_attention(name: str, padded: bool) -> None:
    policy = POLICIES.get(name, AdaKV(0.4))
    expected = run(tiny_model("llama", seed=1), policy, padded)
    with uncompiled():
        model = tiny_model("llama", seed=1, attn_implementation="flex_attention")
        assert_close(run(model, policy, padded), expected)


def flash(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What flash attention computes: the order of keys decides, the last query sees the last key.

    With the inputs it takes: a mask of tokens, no positions, its own name in the configuration.
    """
    assert module.config._attn_implementation == "flash_attention_2"
    assert "position_ids" not in kwargs or query.shape[2] == 1 or attention_mask is not None
    batch, heads, query_len, _ = query.shape
    key_len = key.shape[2]
    tokens = torch.ones(batch, key_len, dtype=torch.bool)
    if attention_mask is not None:
        assert attention_mask.shape == (batch, key_len)
        tokens = attention_mask.bool()
    slots = tokens.cumsum(dim=1)  # padding is left out: the order of what is left counts
    own = slots[:, key_len - query_len :, None]
    visible = (slots[:, None] <= own) & tokens[:, None]
    if sliding_window is not None:
        visible &= slots[:, None] > own - sliding_window
    visible |= ~tokens[:, key_len - query_len :, None]
    group = heads // key.shape[1]
    output = nn.functional.scaled_dot_product_attention(
        query,
        key.repeat_interleave(group, dim=1),
        value.repeat_interleave(group, dim=1),
        attn_mask=visible[:, None],
        scale=scaling,
    )
    return output.transpose(1, 2), None


@pytest.fixture
def flash_llama(monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    return with_flash(tiny_model("llama", seed=1), monkeypatch)


def with_flash(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    monkeypatch.setitem(AttentionInterface._global_mapping, "flash_attention_2", flash)
    model.config._attn_implementation_internal = "flash_attention_2"
    return model


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", POLICIES)
def test_flash_attention_in_all_but_the_kernel(
    flash_llama: PreTrainedModel, name: str, padded: bool
) -> None:
    expected = run(tiny_model("llama", seed=1), POLICIES[name], padded)
    assert_close(run(flash_llama, POLICIES[name], padded), expected)


def test_flash_attention_cannot_mask_heads(flash_llama: PreTrainedModel) -> None:
    with pytest.raises(UnsupportedModelError, match="heads of a row must hold equally many tokens"):
        run(flash_llama, AdaKV(0.4), padded=False)


def test_flash_attention_over_sliding_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sliding layers hold all of their window, so that slots measure it; no gaps before them."""
    expected = run(FAMILIES["mistral_sliding"].build(1), SnapKV(0.4), padded=False)
    model = with_flash(FAMILIES["mistral_sliding"].build(1), monkeypatch)
    assert_close(run(model, SnapKV(0.4), padded=False), expected)
    model = with_flash(FAMILIES["gemma3"].build(1), monkeypatch)
    with pytest.raises(UnsupportedModelError, match="drops tokens under flash attention"):
        run(model, FastKV(tsp_layer=2), padded=False)


FLASH_HERE = torch.cuda.is_available() and importlib.util.find_spec("flash_attn") is not None


@pytest.mark.skipif(not FLASH_HERE, reason="needs a GPU and the flash-attn package")
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", POLICIES)
def test_flash_attention(name: str, padded: bool) -> None:  # pragma: no cover
    def logits(implementation: str) -> list[Tensor]:
        model = FAMILIES["llama"].build(1, attn_implementation=implementation)
        model = model.to("cuda", torch.bfloat16)
        with torch.device("cuda"):
            return run(model, POLICIES[name], padded)

    for one, other in zip(logits("flash_attention_2"), logits("sdpa"), strict=True):
        assert torch.allclose(one, other, atol=0.1, rtol=0.05)
