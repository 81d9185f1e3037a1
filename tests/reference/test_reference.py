"""Tests the slow reference by hand, against Transformers and against dense attention."""

from typing import Any, cast

import pytest
import torch

from tests.reference import (
    FAMILIES,
    PAD_TOKEN_ID,
    Act,
    Family,
    FastKV,
    FullContext,
    ReferenceState,
    SnapKV,
    TurnResult,
    causal_visible,
    dense_masked_logits,
    random_tokens,
    tiny_model,
    visible_after,
)
from tests.reference.comparing import max_error


def test_visible_after_by_hand() -> None:
    """Masks are right by hand: four tokens read, two decoded, two kept by each KV head."""
    (mask,) = visible_after([Act(0, 4, [[[0, 3], [2, 3]]])], 4, 6)
    prompt = [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0]]
    first = [*prompt, [1, 0, 0, 1, 1, 0], [1, 0, 0, 1, 1, 1]]
    second = [*prompt, [0, 0, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1]]
    assert mask.int().tolist() == [first, first, second, second]


def test_visible_after_two_acts_and_dropped_tokens() -> None:
    """A dropped token stays hidden, and the second prompt sees what the first one left."""
    acts = [Act(0, 3, [[[0, 2]]], [[0, 2]]), Act(3, 5, [[[2, 4]]], None)]
    (mask,) = visible_after(acts, 1, 6)
    assert mask[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 0, 1, 1, 0, 0],
        [1, 0, 1, 1, 1, 0],
        [0, 0, 1, 0, 1, 1],
    ]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_full_context_equals_generate(family: Family, attention: str) -> None:
    model = tiny_model(family, seed=3, attn_implementation=attention)
    prompt = random_tokens(5, 43)
    ours = ReferenceState(model, FullContext()).turn(prompt, 16)
    theirs = cast(Any, model).generate(
        torch.tensor([prompt]),
        max_new_tokens=17,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert ours.tokens == theirs.sequences[0, len(prompt) :].tolist()
    assert max_error(ours.logits, torch.cat(theirs.logits)) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_causal_equals_forward(family: Family) -> None:
    model = tiny_model(family, seed=1, num_layers=3)
    row = random_tokens(2, 61)
    with torch.no_grad():
        theirs = model(torch.tensor([row])).logits[0]
    assert max_error(dense_masked_logits(model, row, causal_visible(3, 6, 61)), theirs) < 1e-4


def test_two_turns_equal_one_long_forward() -> None:
    model = tiny_model("mistral", seed=8)
    state = ReferenceState(model, FullContext())
    first = state.turn(random_tokens(1, 17), 5)
    question = [first.tokens[-1], *random_tokens(2, 11)]
    second = state.turn(question, 4, forced=[5, 6, 7, 8])
    row = [*random_tokens(1, 17), *first.tokens[:-1], *question, 5, 6, 7, 8]
    assert state.seen == len(row)
    with torch.no_grad():
        theirs = model(torch.tensor([row])).logits[0]
    assert max_error(first.logits, theirs[16:22]) < 1e-4
    assert max_error(second.logits, theirs[-5:]) < 1e-4
    assert second.tokens == theirs[-5:].argmax(-1).tolist()


def check_counts(turn: TurnResult, kept_len: int, seen_len: int) -> None:
    """Asserts that every layer and KV head kept `kept_len` seen positions, ascending and unique."""
    for layer in turn.kept:
        assert len(layer) == 2
        for positions in layer:
            assert len(positions) == kept_len
            assert positions == sorted(set(positions))
            assert positions[0] >= 0
            assert positions[-1] < seen_len


def test_fastkv_counts_over_two_turns() -> None:
    """Rates count all tokens seen so far, in every layer and in both turns."""
    model = tiny_model("llama", seed=2, num_layers=6)
    state = ReferenceState(model, FastKV(retention_rate=0.2, tsp_rate=0.35, window_size=6))
    first = state.turn(random_tokens(8, 60), 10)
    check_counts(first, 12, 60)
    assert list(first.propagated) == [2]  # 6 // 2 - 1
    assert len(first.propagated[2]) == 21
    assert first.propagated[2][-6:] == list(range(54, 60))
    assert [len(reached) for reached in first.reached] == [60] * 3 + [21] * 3
    for layer in first.kept[3:]:
        assert all(set(positions) <= set(first.propagated[2]) for positions in layer)
    assert all(len(held) == 22 for layer in state.positions() for held in layer)
    second = state.turn(random_tokens(9, 40), 0)
    check_counts(second, 22, 110)  # int(110 * 0.2)
    assert len(second.propagated[2]) == 38  # int(110 * 0.35)
    assert min(second.propagated[2]) >= 70
    assert second.decode_logits.shape == (0, 97)
    assert len(second.tokens) == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_choices_follow_from_the_models_own_attention(family: Family) -> None:
    """Tensor operations on Transformers' attention make the same choices.

    SnapKV prefills in full, so every layer's attention is the model's; FastKV's up to `tsp_layer`.
    """
    model = tiny_model(family, seed=6, attn_implementation="eager")
    prompt = random_tokens(11, 53)
    with torch.no_grad():
        attentions = model(torch.tensor([prompt]), output_attentions=True).attentions
    snap_kv = SnapKV(0.3, window_size=5, kernel_size=3)
    fast_kv = FastKV(0.3, window_size=5, kernel_size=3, tsp_rate=0.5, tsp_layer=2)
    snap = ReferenceState(model, snap_kv).turn(prompt, 0)
    fast = ReferenceState(model, fast_kv).turn(prompt, 0)
    window = torch.arange(48, 53)
    for layer, probabilities in enumerate(attentions):
        sums = probabilities[0, :, -5:, :-5].sum(1)  # [query_heads, key_len - window]
        pooled = torch.nn.functional.max_pool1d(sums[None], 3, stride=1, padding=1)[0]
        for head, scores in enumerate(pooled.view(2, 3, 48).mean(1)):
            order = scores.argsort(descending=True, stable=True)[:10]  # int(53 * 0.3) - 5
            assert snap.kept[layer][head] == torch.cat([order.sort().values, window]).tolist()
        assert layer > 2 or fast.kept[layer] == snap.kept[layer]
        if layer == 2:
            order = pooled.mean(0).argsort(descending=True, stable=True)[:21]
            passed = torch.cat([order.sort().values, window]).tolist()
            assert fast.propagated == {2: passed}


def test_heads_choose_for_themselves() -> None:
    """KV heads of a layer keep different tokens, so that tests notice swapped heads."""
    model = tiny_model("qwen3", seed=5)
    turn = ReferenceState(model, SnapKV(retention_rate=0.3)).turn(random_tokens(1, 60), 0)
    assert all(layer[0] != layer[1] for layer in turn.kept)
    assert turn.margin > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_is_peaked(family: Family) -> None:
    """Queries with at least ten earlier keys have peaked attention at every layer."""
    for seed in range(3):
        model = tiny_model(family, seed=seed, attn_implementation="eager")
        with torch.no_grad():
            row = torch.tensor([random_tokens(seed, 60)])
            attentions = model(row, output_attentions=True).attentions
        for probabilities in attentions:
            assert float(probabilities[0, :, 10:].amax(-1).median()) > 0.3


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_neither_degenerate_nor_large(family: Family) -> None:
    for seed in range(3):
        turn = ReferenceState(tiny_model(family, seed=seed), FullContext()).turn(
            random_tokens(seed, 30), 12
        )
        assert torch.isfinite(turn.decode_logits).all()
        assert 0.5 < float(turn.decode_logits.std()) < 4
        assert float(turn.decode_logits.abs().max()) < 12
        assert len(set(turn.tokens)) > 3


def test_models_leave_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    one, other = (
        tiny_model("llama", seed=0),
        tiny_model("llama", seed=0, attn_implementation="eager"),
    )
    assert torch.equal(before, torch.get_rng_state())
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert PAD_TOKEN_ID not in random_tokens(0, 500)
    assert one.get_input_embeddings().weight[PAD_TOKEN_ID].abs().max() > 0.1
