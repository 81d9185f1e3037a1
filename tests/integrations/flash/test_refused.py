"""What needs a mask that flash attention cannot take is refused before a layer runs."""

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy import CachePolicy, LayerContext
from kvpolicy.errors import UnsupportedModelError
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.checking import check_model
from kvpolicy.policies import (
    AdaKV,
    AdaptiveHeadSelector,
    CriticalSelector,
    FastKV,
    FirstTokensWholeSelector,
    FullContext,
    GemFilter,
    GlobalThresholdSelector,
    GQAGroupSelector,
    KVzip,
    PassAllPropagation,
    PromptDistill,
    ReplayKV,
    SnapKV,
    WindowMaxPoolScorer,
)
from tests.integrations.decoding.support import bounded
from tests.integrations.flash.stand_in import CALLS, under_flash
from tests.integrations.flash.support import assert_close, forward, model_of
from tests.reference import random_tokens

PROMPT = torch.tensor([random_tokens(1, 40)])


def selecting(selector: Any) -> CachePolicy:
    return CachePolicy(WindowMaxPoolScorer(4), selector, PassAllPropagation())


UNEQUAL = {
    "adakv": AdaKV(0.3),
    "kvzip": KVzip(0.3),
    "replaykv": ReplayKV(0.3),
    "critical": selecting(CriticalSelector(AdaptiveHeadSelector(0.3))),
    "first_tokens": selecting(FirstTokensWholeSelector(GlobalThresholdSelector(0.3))),
    "bound": bounded(AdaKV, 20, 4),
}
DROPPING = {
    "fastkv": FastKV(tsp_layer=2, tsp_rate=0.5, retention_rate=0.3),
    "promptdistill": PromptDistill(tsp_rate=0.5),
    "gemfilter": GemFilter(filter_layer=2, retention_rate=0.4),
}


def refuses(model: PreTrainedModel, policy: CachePolicy, ids: Tensor, message: str) -> None:
    """Asserts that a prompt is refused at once, and that cache and model can be used afterwards."""
    store = PolicyCache(policy)
    CALLS.clear()
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match=message) as error:
            model.generate(ids, cache=store, max_new_tokens=2)
        assert "attn_implementation='sdpa'" in str(error.value)
    assert not CALLS
    assert store.get_seq_length() == 0
    assert check_model(model).refusal_of(policy, ids.shape[1]) == str(error.value)
    sdpa = under_flash(model, "sdpa")
    said = sdpa.generate(ids, cache=store, max_new_tokens=2, do_sample=False)
    again = sdpa.generate(ids, cache=PolicyCache(policy), max_new_tokens=2, do_sample=False)
    assert torch.equal(said, again)
    model.generate(ids, cache=PolicyCache(FullContext()), max_new_tokens=2)
    assert CALLS


@pytest.mark.parametrize("flash", ["flash_attention_2", "flash_attention_4"])
@pytest.mark.parametrize("name", UNEQUAL)
def test_unequal_heads(name: str, flash: str) -> None:
    message = f"must not be '{flash}' if .* may keep different numbers of tokens in the heads"
    refuses(model_of("llama", flash), UNEQUAL[name], PROMPT, message)


@pytest.mark.parametrize("length", [14, 40])  # shorter than the window, and longer
@pytest.mark.parametrize("name", DROPPING)
def test_drops_beside_windows(name: str, length: int) -> None:
    """A short prompt too: the answer may outgrow the window."""
    message = "drops tokens or restarts in a model with sliding windows"
    if name == "gemfilter" and length == 40:
        return  # sdpa refuses it as well
    refuses(model_of("gemma3", "flash_attention_2"), DROPPING[name], PROMPT[:, :length], message)


def test_what_sdpa_refuses_too_is_refused_for_that_reason() -> None:
    model = model_of("gemma3", "flash_attention_2")
    with pytest.raises(UnsupportedModelError, match="context must fit the sliding window"):
        model.generate(PROMPT, cache=PolicyCache(DROPPING["gemfilter"]), max_new_tokens=2)


def test_one_head_is_equal_to_itself() -> None:
    """Latent attention has one choice for all heads, so that AdaKV chooses as under sdpa."""
    found, expected = (
        model_of("deepseek_v3", flash).generate(
            PROMPT,
            cache=PolicyCache(AdaKV(0.3)),
            max_new_tokens=5,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        for flash in ("flash_attention_2", "")
    )
    assert_close(torch.stack(found.logits), torch.stack(expected.logits))
    assert CALLS


@attrs.frozen
class Undeclared(GQAGroupSelector):
    """Keeps one token less in the first head, and does not say so."""

    def kept_counts(self, context: LayerContext) -> tuple[int, ...] | None:
        return None

    def select(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        kept = super().select(saliency, context).clone()
        kept[:, 0, 0] = -1
        return kept


def test_heads_that_turn_out_to_be_unequal() -> None:
    """The token after the prompt is refused; under sdpa the cache goes on."""
    model, policy = model_of("llama", "flash_attention_2"), selecting(Undeclared(0.3))
    store, expected = PolicyCache(policy), PolicyCache(policy)
    with store.attached(model):
        forward(model, store, PROMPT)
        with pytest.raises(UnsupportedModelError, match="heads of a row must hold equally many"):
            forward(model, store, PROMPT[:, :1])
    assert store.get_seq_length() == 40
    sdpa, found = under_flash(model, "sdpa"), []
    with expected.attached(sdpa):
        forward(sdpa, expected, PROMPT)
        found.append(forward(sdpa, expected, PROMPT[:, :1]))
    model.config._attn_implementation = "sdpa"
    with store.attached(model):
        found.append(forward(model, store, PROMPT[:, :1]))
    model.config._attn_implementation = "flash_attention_2"
    assert_close(*found)


@pytest.mark.parametrize(
    ("name", "policy", "message"),
    [
        ("llama", AdaKV(0.5, window_size=2), "equally many tokens in all heads"),
        ("gemma3", SnapKV(0.3, window_size=3), "all tokens of a layer's sliding window"),
        ("gemma3", DROPPING["gemfilter"], "all tokens of a layer's sliding window"),
    ],
)
def test_a_cache_that_was_filled_under_sdpa(
    name: str, policy: CachePolicy, message: str, tmp_path: Path
) -> None:
    """A saved cache, and one whose model changes its attention, in an answer."""
    model, store, next_ids = under_flash(model_of(name), "sdpa"), PolicyCache(policy), PROMPT[:, :1]
    with store.attached(model):
        forward(model, store, PROMPT[:, :14])
    store.save(tmp_path / "saved")
    loaded, found = PolicyCache.load(tmp_path / "saved", policy), []
    for each in (store, loaded):
        model.config._attn_implementation = "flash_attention_2"
        with pytest.raises(UnsupportedModelError, match=message), each.attached(model):
            pass
        model.config._attn_implementation = "sdpa"
        with each.attached(model):
            found.append(forward(model, each, next_ids))
    assert_close(*found)


def test_a_cache_that_flash_attention_can_read() -> None:
    """Filled under sdpa, by a prompt longer than the window."""
    model, found = under_flash(model_of("gemma3"), "sdpa"), []
    for flash in ("sdpa", "flash_attention_2"):
        store = PolicyCache(SnapKV(0.3))
        with store.attached(model):
            forward(model, store, PROMPT)
        model.config._attn_implementation = flash
        with store.attached(model):
            found.append(forward(model, store, PROMPT[:, :1]))
    assert CALLS
    assert_close(*found)
