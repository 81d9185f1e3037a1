"""Layers that run for the tokens that go on: same results, less computed."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy import CachePolicy, attention
from kvpolicy.integrations.transformers import PolicyCache
from kvpolicy.integrations.transformers.forward.pass_run import PassRun
from kvpolicy.integrations.transformers.model.masks import Visibility
from kvpolicy.policies import AdaKV, FastKV, FullContext, GemFilter, PyramidInfer, SnapKV
from tests.integrations.support.conversation import METHODS, left_padded, prompt
from tests.integrations.support.reading import Counts, read
from tests.reference import random_tokens, tiny_model

POLICIES: dict[str, CachePolicy] = {
    "full_context": FullContext(),
    "snapkv": SnapKV(0.4),
    "adakv": AdaKV(0.4),
    "fastkv": FastKV(tsp_rate=0.5, retention_rate=0.3),
    "fastkv_last_layer": FastKV(tsp_layer=3, tsp_rate=0.5, retention_rate=0.3),
    "gemfilter": GemFilter(retention_rate=0.4),
    "pyramidinfer": PyramidInfer(recent_rate=0.1, decay_ratio=0.3, min_context=3),
    "staged": METHODS["two_stages"][0],
}


@torch.no_grad()
def test_the_dropping_layer_is_computed_for_what_goes_on() -> None:
    model = tiny_model("llama", seed=1)
    counts = Counts(model)
    read(model, FastKV(tsp_layer=1, tsp_rate=0.5, retention_rate=0.3), prompt(60))
    assert counts.of("mlp") == counts.of("o_proj") == [60, 30, 30, 30]
    assert counts.of("q_proj") == [60, 90, 30, 30]


@torch.no_grad()
def test_the_last_layer_is_computed_for_the_logits_asked_for() -> None:
    for policy, mlp in (
        (FullContext(), [60, 60, 60, 3]),
        (GemFilter(filter_layer=2), [66, 66, 6, 3]),
    ):
        model = tiny_model("llama", seed=1)
        counts = Counts(model)
        _, logits = read(model, policy, prompt(60), logits_to_keep=3)
        assert logits.shape[1] == 3
        assert counts.of("mlp") == mlp


@torch.no_grad()
def test_little_is_not_narrowed() -> None:
    """Where most tokens go on, running projections twice would cost more than it saves."""
    model = tiny_model("llama", seed=1)
    counts = Counts(model)
    read(model, FastKV(tsp_layer=1, tsp_rate=0.8, retention_rate=0.3), prompt(60))
    assert counts.of("q_proj") == [60, 60, 48, 48]


@torch.no_grad()
def test_hidden_states_and_attentions_are_whole_where_asked_for() -> None:
    model = tiny_model("llama", seed=1, attn_implementation="eager")
    cache = PolicyCache(FastKV(tsp_layer=1, tsp_rate=0.5, retention_rate=0.3))
    with cache.attached(model):
        output = model(
            prompt(60),
            cache=cache,
            logits_to_keep=1,
            output_hidden_states=True,
            output_attentions=True,
        )
    assert [state.shape[1] for state in output.hidden_states] == [60, 60, 30, 30, 30]
    assert [each.shape[2:] for each in output.attentions] == [
        (60, 60),
        (60, 60),
        (30, 30),
        (30, 30),
    ]


@torch.no_grad()
def test_a_failed_call_asks_nothing_of_the_next() -> None:
    model = tiny_model("llama", seed=1)
    cache = PolicyCache(FullContext())
    with cache.attached(model):
        with pytest.raises(ValueError, match="attention_mask must be"):
            model(prompt(60), attention_mask=torch.ones(1, 3), cache=cache, logits_to_keep=1)
        assert model.model(prompt(60), cache=cache).last_hidden_state.shape[1] == 60


@torch.no_grad()
@pytest.mark.parametrize("policy", [FullContext(), SnapKV(0.4), FastKV(tsp_rate=0.2)], ids=repr)
def test_several_last_logits_are_those_of_the_last_columns(policy: CachePolicy) -> None:
    """Also where padding between a row's tokens is moved: the last columns are other tokens then.

    With FastKV the logits are those of the tokens that went on, in whose order they are left.
    """
    model = tiny_model("llama", seed=1)
    ids, later = (torch.cat([prompt(length, 0), prompt(length, 1)]) for length in (30, 12))
    mask = torch.ones(2, 42, dtype=torch.int64)
    mask[1, 38:40] = 0
    logits = {}
    for keep in (0, 5):  # 0: all
        cache = PolicyCache(policy)
        with cache.attached(model):
            model(ids, cache=cache)
            cache.start_turn()
            output = model(later, attention_mask=mask, cache=cache, logits_to_keep=keep)
        logits[keep] = output.logits
    assert logits[5].shape[1] == 5 < logits[0].shape[1]
    read = torch.ones(2, 5, dtype=torch.bool) if logits[0].shape[1] < 12 else mask[:, -5:].bool()
    torch.testing.assert_close(logits[5][read], logits[0][:, -5:][read], atol=1e-5, rtol=0)


@torch.no_grad()
def run(model: PreTrainedModel, policy: CachePolicy, padded: bool) -> tuple[list[Tensor], Any]:
    """Two turns and three decoded tokens in each; in the second, padding stands in the middle."""
    rows = [random_tokens(0, 60), random_tokens(1, 43)][: 1 + padded]
    ids, mask = left_padded(rows)
    cache = PolicyCache(policy)
    logits, kept = [], []
    with cache.attached(model):
        for turn in range(2):
            if turn:
                cache.start_turn()
                added = [random_tokens(5, 40), random_tokens(6, 22)][: 1 + padded]
                ids, new_mask = left_padded([[7, *row] for row in added])
                mask = torch.cat([mask, new_mask], dim=1)
            for _ in range(4):
                output = model(ids, attention_mask=mask, cache=cache, logits_to_keep=1)
                logits.append(output.logits[:, -1])
                ids = torch.full((len(rows), 1), 3)
                mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
            mask = mask[:, :-1]
            kept.append([layer.positions for layer in cache.layers])
    return logits, kept


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("block", [1 << 25, 200])
def test_narrowing_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, name: str, padded: bool, implementation: str, block: int
) -> None:
    """Also in blocks of few queries; against the same run with every layer run whole."""
    model = tiny_model("llama", seed=1, attn_implementation=implementation)
    monkeypatch.setitem(attention.BLOCK_BYTES, "cpu", block)
    logits, kept = run(model, POLICIES[name], padded)
    monkeypatch.setattr(PassRun, "_narrows", lambda *_: False)
    expected, whole = run(model, POLICIES[name], padded)
    for one, other in zip(logits, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    for turn, turn_whole in zip(kept, whole, strict=True):
        for one, other in zip(turn, turn_whole, strict=True):
            assert torch.equal(one, other)


@torch.no_grad()
def test_no_mask_is_larger_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def record(seen: Visibility, *args: Any) -> Tensor:
        mask = whole(seen, *args)
        sizes.append(mask.numel())
        return mask

    whole = Visibility.mask
    monkeypatch.setattr(Visibility, "mask", record)
    monkeypatch.setitem(attention.BLOCK_BYTES, "cpu", 4096)
    model = tiny_model("llama", seed=1)
    read(model, FastKV(tsp_rate=0.5, retention_rate=0.3), prompt(1024))
    assert len(sizes) == 128  # 512 tokens, four at a time
    assert max(sizes) == 4096
    assert sum(sizes) < 0.6 * 512 * 1024  # later keys are not looked at


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize(("first", "second"), [(15, 6), (20, 7), (9, 3), (40, 6)])
def test_a_short_second_turn_goes_on_whole(first: int, second: int, implementation: str) -> None:
    """More is promised to be dropped there than is, since the window is protected."""
    model = tiny_model("llama", seed=1, attn_implementation=implementation)
    cache = PolicyCache(FastKV())
    said = model.generate(prompt(first), cache=cache, max_new_tokens=5, do_sample=False)
    whole = torch.cat([said, prompt(second, seed=1)], dim=1)
    model.generate(
        whole, attention_mask=torch.ones_like(whole), cache=cache, max_new_tokens=5, do_sample=False
    )
    assert cache.get_seq_length() == first + 5 + second + 4
