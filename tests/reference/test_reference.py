"""Tests the slow reference by hand, against Transformers and against dense attention."""

from math import inf
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
    StreamingLLM,
    TurnResult,
    causal_visible,
    dense_masked_logits,
    random_tokens,
    tiny_model,
    visible_after,
)
from tests.reference.attention import Entry, masked_softmax
from tests.reference.comparing import max_error
from tests.reference.decoder import rotate
from tests.reference.methods import LayerView
from tests.reference.selection import (
    budget,
    head_mean,
    highest,
    margin,
    max_pool,
    max_pool_peak_first,
    sinks_and_recent,
    window_and_highest,
    window_saliency,
)


def entry(position: int, key: list[float] | None = None) -> Entry:
    """Returns an entry at a position, with a key of two zeros unless given."""
    return Entry(position, torch.tensor(key or [0.0, 0.0]), torch.zeros(2))


@pytest.mark.parametrize(
    ("rate", "tokens", "seen", "available", "protected", "expected"),
    [
        (0.1, None, 50, 50, 4, 5),
        (0.1, None, 59, 59, 4, 5),  # rounds down
        (0.1, None, 50, 50, 8, 8),  # the protected are always kept
        (0.1, None, 5, 5, 8, 5),  # but there are only 5
        (0.5, None, 100, 30, 8, 30),  # a rate of the tokens seen, not of those at hand
        (0.29, None, 100, 100, 8, 28),  # the product is 28.999999999999996 in floats
        (1.0, None, 13, 13, 0, 13),
        (None, 7, 50, 50, 4, 7),
        (None, 3, 50, 50, 4, 4),
        (0.9, 7, 50, 50, 4, 7),  # tokens decide where they are given
        (None, 99, 50, 20, 4, 20),
    ],
)
def test_budget(
    rate: float | None, tokens: int | None, seen: int, available: int, protected: int, expected: int
) -> None:
    count = budget(rate, tokens, seen=seen, available=available, protected=protected)
    assert count == expected


def test_max_pool() -> None:
    row = [3.0, 1.0, 0.0, 0.0, 4.0]
    assert max_pool(row, 1) == row
    assert max_pool(row, 3) == [3.0, 3.0, 1.0, 4.0, 4.0]
    assert max_pool(row, 5) == [3.0, 3.0, 4.0, 4.0, 4.0]
    assert max_pool([-2.0, -1.0], 7) == [-1.0, -1.0]  # the edge adds no zeros
    assert max_pool([], 3) == []


def test_max_pool_peak_first() -> None:
    row = [0.0, 0.0, 0.0, 2048.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert max_pool_peak_first(row, 1) == row
    assert max_pool_peak_first(row, 7) == [2042, 2043, 2044, 2048, 2047, 2046, 2045, 0, 0]
    # A neighbour of the higher peak counts more than the lower peak itself.
    assert max_pool_peak_first([0.0, 2048.0, 1024.0, 0.0], 3) == [2046, 2048, 2047, 1023.5]
    assert max_pool_peak_first([], 3) == []


def test_highest_breaks_ties_to_the_earlier() -> None:
    assert highest([1.0, 5.0, 5.0, 5.0, 2.0], 2) == [1, 2]
    assert highest([0.0, 0.0, 0.0], 1) == [0]
    assert highest([2.0, 7.0, 2.0, 9.0], 3) == [0, 1, 3]
    assert highest([1.0, 2.0], 0) == []


def test_window_and_highest() -> None:
    scores = [0.1, 0.9, 0.9, 0.2]
    assert window_and_highest(scores, 6, 2) == [4, 5]
    assert window_and_highest(scores, 6, 3) == [1, 4, 5]
    assert window_and_highest(scores, 6, 5) == [1, 2, 3, 4, 5]
    assert window_and_highest([], 2, 2) == [0, 1]


def test_sinks_and_recent() -> None:
    assert sinks_and_recent([0, 1, 2, 3, 4, 5, 6], 2, 4) == [0, 1, 5, 6]
    assert sinks_and_recent([0, 1, 2, 3, 4, 5, 6], 2, 2) == [0, 1]
    assert sinks_and_recent([0, 1, 40, 41, 42], 2, 3) == [0, 1, 4]
    assert sinks_and_recent([0, 1, 2], 0, 2) == [1, 2]


def test_margin() -> None:
    assert margin([8.0, 6.0, 3.0], [0, 1]) == 0.5
    assert margin([8.0, 6.0, 6.0], [0, 1, 7]) == 0.25  # a tie is no gap, 8 against 6 is one
    assert margin([8.0, 6.0], [0, 1]) == inf


def test_head_mean() -> None:
    assert head_mean([[1.0, 2.0, 3.0], [3.0, 6.0, 0.0]]) == [2.0, 4.0, 1.5]


def test_masked_softmax() -> None:
    scores = torch.tensor([[0.0, 100.0, 0.0]])
    visible = torch.tensor([[True, False, True]])
    assert masked_softmax(scores, visible).tolist() == [[0.5, 0.0, 0.5]]


def test_rotate() -> None:
    vector = torch.tensor([1.0, 0.0, 0.0, 2.0])  # pairs (1, 0) and (0, 2)
    turned = rotate(vector, 1, 4.0)  # by 1 and by 1 / sqrt(4) of a radian
    expected = torch.tensor([0.5403023, -0.9588511, 0.8414710, 1.7551651])
    assert max_error(turned, expected) < 1e-6
    assert torch.equal(rotate(vector, 0, 4.0), vector)


def test_window_saliency_by_hand() -> None:
    """Of four keys with equal weights, key 1 gets twice the attention (window 2, one head)."""
    twice = 0.6931471805599453
    keys = [[0.0, 0.0], [twice, 0.0], [0.0, 0.0], [0.0, 0.0]]
    held = [entry(position, key) for position, key in enumerate(keys)]
    queries = torch.tensor([[2.0, 0.0]] * 4)
    # Query 2 sees weights 1 2 1, query 3 sees 1 2 1 1; scaling 0.5 undoes the 2 of the queries.
    expected = [1 / 4 + 1 / 5, 2 / 4 + 2 / 5]
    for kernel_size, answer in ((1, expected), (3, [expected[1]] * 2)):
        (scores,) = window_saliency(
            [queries],
            [0, 1, 2, 3],
            [held],
            window_size=2,
            kernel_size=kernel_size,
            scaling=0.5,
        )
        assert scores == pytest.approx(answer, abs=1e-6)


def uniform_layer(
    old: list[list[int]], new: list[int], *, seen: int, layer_idx: int = 0
) -> LayerView:
    """Returns a layer of two KV heads and six query heads, in which every product is 0."""
    entries = [[entry(position) for position in head + new] for head in old]
    queries = [torch.zeros(len(new), 2)] * 6
    return LayerView(layer_idx, 4, queries, new, entries, seen, 1.0)


def test_all_ties_keep_the_earliest() -> None:
    layer = uniform_layer([[], []], list(range(10)), seen=10)
    choice = SnapKV(retention_rate=0.5, window_size=2, kernel_size=3).choose(layer)
    assert choice.kept == [[0, 1, 2, 8, 9]] * 2
    assert choice.passed is None


def test_few_tokens_are_all_window() -> None:
    layer = uniform_layer([[], []], [0, 1, 2], seen=3, layer_idx=1)
    choice = FastKV(retention_rate=0.1, tsp_rate=0.1, window_size=8).choose(layer)
    assert choice.kept == [[0, 1, 2]] * 2
    assert choice.passed == [0, 1, 2]


def test_second_turn_window_reaches_back() -> None:
    """A window of four contains the two new tokens and two old ones."""
    layer = uniform_layer([[0, 5, 20, 21], [3, 4, 20, 21]], [22, 23], seen=24, layer_idx=1)
    choice = FastKV(retention_rate=0.21, tsp_rate=0.3, window_size=4, kernel_size=1).choose(layer)
    assert choice.kept == [[0, 2, 3, 4, 5]] * 2  # int(24 * 0.21) = 5
    assert choice.passed == [0, 1]  # the new ones are fewer than the window


def test_only_new_tokens_compete_to_go_on() -> None:
    layer = uniform_layer([[0, 1, 9], [0, 2, 9]], [10, 11, 12, 13, 14], seen=15, layer_idx=1)
    method = FastKV(retention_rate=0.2, tsp_rate=0.2, window_size=2, kernel_size=1)
    assert method.choose(layer).passed == [0, 3, 4]  # int(15 * 0.2) = 3
    assert method.choose(layer).kept == [[0, 6, 7]] * 2
    assert FastKV(tsp_tokens=4, window_size=2).choose(layer).passed == [0, 1, 3, 4]


def test_new_tokens_compete_by_their_own_columns() -> None:
    """Among old tokens token 1 is most salient, among new ones before the window token 12."""
    heights = {1: 3.0, 12: 2.0, 10: 1.0}
    new = [10, 11, 12, 13, 14]
    held = [entry(position, [heights.get(position, 0.0), 0.0]) for position in [0, 1, 9, *new]]
    layer = LayerView(1, 4, [torch.ones(5, 2)] * 6, new, [held, held], 15, 1.0)
    method = FastKV(retention_rate=0.2, tsp_rate=0.2, window_size=2, kernel_size=1)
    assert method.choose(layer).passed == [2, 3, 4]  # int(15 * 0.2) = 3: token 12, the window
    assert method.choose(layer).kept == [[1, 6, 7]] * 2
    assert FastKV(tsp_tokens=4, window_size=2, kernel_size=1).choose(layer).passed == [0, 2, 3, 4]


def test_streaming_in_a_second_turn() -> None:
    layer = uniform_layer([[0, 1, 8, 9], [0, 1, 8, 9]], [10, 11], seen=12)
    for rate, kept in ((0.42, [0, 1, 3, 4, 5]), (0.1, [0, 1])):
        assert StreamingLLM(retention_rate=rate, num_sinks=2).choose(layer).kept == [kept] * 2


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
