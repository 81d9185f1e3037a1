"""Losses: refused where a policy would have no effect, right where it has."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from kvpolicy import CachePolicy
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.policies import (
    AdaKV,
    FastKV,
    FullContext,
    GQAGroupSelector,
    KeyNormScorer,
    PassAllPropagation,
    SnapKV,
)
from tests.integrations.support.conversation import prompt

PAGE = Path(__file__).parents[2] / "docs" / "scoring.md"
(CODE,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("policy", [SnapKV(0.3), AdaKV(0.5), SnapKV(retention_tokens=16)], ids=str)
def test_a_loss_on_which_the_policy_would_have_no_effect(
    model: PreTrainedModel, policy: CachePolicy
) -> None:
    cache = PolicyCache(policy)
    message = "labels must not be given in a forward in which the policy acts.*read the context"
    with torch.no_grad(), cache.attached(model):
        with pytest.raises(ValueError, match=message):
            model(prompt(60), cache=cache, labels=prompt(60))
        assert cache.get_seq_length() == 0
        model(prompt(60), cache=cache)
        assert model(prompt(6, 1), cache=cache, labels=prompt(6, 1)).loss > 0
        cache.start_turn()
        with pytest.raises(ValueError, match=message):
            model(prompt(6, 1), cache=cache, labels=prompt(6, 1))
    dropping = PolicyCache(FastKV(tsp_rate=0.5, retention_rate=0.3))
    with dropping.attached(model), pytest.raises(ValueError, match="a dropped token has no logits"):
        model(prompt(60), cache=dropping, labels=prompt(60))


EVERYTHING = CachePolicy(KeyNormScorer(), GQAGroupSelector(1.0), PassAllPropagation())


@torch.no_grad()
@pytest.mark.parametrize("policy", [FullContext(), SnapKV(1.0), EVERYTHING], ids=str)
def test_a_loss_under_a_policy_that_keeps_everything(
    model: PreTrainedModel, policy: CachePolicy
) -> None:
    cache = PolicyCache(policy)
    with cache.attached(model):
        loss = model(prompt(60), cache=cache, labels=prompt(60)).loss
    torch.testing.assert_close(loss, model(prompt(60), labels=prompt(60)).loss)


def scored(model: PreTrainedModel, cache: PolicyCache, **texts: Tensor) -> Any:
    names: dict[str, Any] = {"torch": torch, "model": model, "cache": cache, **texts}
    exec(CODE, names)
    return names["loss"]


@torch.no_grad()
def test_the_way_that_the_page_shows(model: PreTrainedModel) -> None:
    texts = {"context": prompt(60), "continuation": prompt(12, seed=1)}
    whole = torch.cat(list(texts.values()), dim=1)
    full = cross_entropy(model(whole).logits[0, 59:-1], whole[0, 60:])
    torch.testing.assert_close(scored(model, PolicyCache(FullContext()), **texts), full)
    cache = PolicyCache(SnapKV(0.3))
    loss = scored(model, cache, **texts)
    # Against dense attention in which each layer sees what it kept of the 59 first.
    want = one_by_one(model, **texts)
    torch.testing.assert_close(loss, want, atol=1e-4, rtol=0)
    assert abs(float(loss - full)) > 0.01
    cache.crop(-13)
    other = copy.deepcopy(cache)
    assert cache.get_seq_length() == other.get_seq_length() == 59


def one_by_one(model: PreTrainedModel, context: Tensor, continuation: Tensor) -> Tensor:
    """The continuation's loss, decoded token by token."""
    cache, rows = PolicyCache(SnapKV(0.3)), []
    with cache.attached(model):
        model(context[:, :-1], cache=cache)
        for token in (context[:, -1:], *continuation[:, :-1].split(1, dim=1)):
            rows.append(model(token, cache=cache).logits[0])
    return cross_entropy(torch.cat(rows), continuation[0])
