"""Tests the slow reference's restart, uneven budgets, stages and protected tokens."""

from itertools import product
from math import inf, log

import pytest
import torch
from transformers import PreTrainedModel

from tests.reference import (
    FAMILIES,
    AdaKV,
    Family,
    FastKV,
    FullContext,
    GemFilter,
    Method,
    PyramidKV,
    ReferenceState,
    SnapKV,
    Staged,
    StreamingLLM,
    TurnResult,
    causal_visible,
    dense_masked_logits,
    random_tokens,
    tiny_model,
    visible_after,
)
from tests.reference.attention import Entry
from tests.reference.comparing import max_error
from tests.reference.head_budgets import share
from tests.reference.layer_budgets import free_places
from tests.reference.methods import LayerView
from tests.reference.selection import margin

KEEPS_ALL: list[Method] = [
    FullContext(),
    StreamingLLM(retention_rate=1.0),
    SnapKV(retention_rate=1.0),
    SnapKV(retention_tokens=500),
    FastKV(retention_rate=1.0, tsp_rate=1.0),
    GemFilter(retention_rate=1.0),
    GemFilter(retention_tokens=500, filter_layer=3),
    PyramidKV(1.0),
    AdaKV(1.0),
    AdaKV(retention_tokens=500, floor=0.0),
    Staged(1.0, stages=((0, 1.0), (2, 1.0))),
    SnapKV(0.1, protect=500),
    StreamingLLM(0.1, protect=500),
    FastKV(0.1, tsp_rate=0.1, protect=500),
    GemFilter(retention_rate=0.1, protect=500),
]
BASIC: list[Method] = [
    StreamingLLM(retention_rate=0.3, num_sinks=3),
    SnapKV(retention_rate=0.37, window_size=5, kernel_size=3),
    SnapKV(retention_tokens=11, window_size=4),
    FastKV(retention_rate=0.23, tsp_rate=0.41, window_size=5, kernel_size=3),
    FastKV(retention_rate=0.3, tsp_rate=0.3, tsp_layer=0, window_size=3),
]
EVICTS: list[Method] = [
    PyramidKV(0.3, window_size=3, kernel_size=3, beta=5),
    PyramidKV(retention_tokens=12, window_size=4, protect=3),
    AdaKV(0.3, window_size=3, kernel_size=3),
    AdaKV(0.25, window_size=2, kernel_size=5, floor=0.0, protect=3),
    Staged(0.2, window_size=4, kernel_size=3, stages=((0, 0.6), (2, 0.3))),
    Staged(0.3, window_size=3, kernel_size=1, stages=((2, 0.3), (1, 0.45)), protect=2),
    SnapKV(0.3, window_size=4, kernel_size=3, protect=5),
    StreamingLLM(0.3, num_sinks=1, protect=4),
    FastKV(0.25, window_size=4, kernel_size=3, tsp_rate=0.4, protect=4),
]


PROTECTS: list[SnapKV | StreamingLLM | GemFilter] = [
    PyramidKV(0.2, protect=3),
    AdaKV(0.25, window_size=2, floor=0.0, protect=3),
    Staged(0.3, window_size=3, stages=((2, 0.3), (1, 0.45)), protect=2),
    SnapKV(0.3, protect=5),
    StreamingLLM(0.3, num_sinks=1, protect=4),
    FastKV(0.25, window_size=4, tsp_rate=0.4, protect=4),
    GemFilter(retention_rate=0.3, protect=4),
]


def giving(
    weights: list[list[float]],
    positions: list[list[int]],
    new_len: int,
    *,
    layer_idx: int = 0,
    num_layers: int = 4,
    seen: int | None = None,
) -> LayerView:
    """Returns a layer with attention in proportion to `weights`, one list per KV head.

    Keys are `[log(weight), 0]`, queries `[1, 0]`, and groups have one head. If a head's weights sum
    to 1, they are the last query's attention.
    """
    entries = [
        [Entry(at, torch.tensor([log(weight), 0.0]), torch.zeros(2)) for at, weight in pairs]
        for pairs in (zip(*lists, strict=True) for lists in zip(positions, weights, strict=True))
    ]
    queries = [torch.tensor([[1.0, 0.0]] * new_len)] * len(weights)
    new = positions[0][-new_len:]
    return LayerView(layer_idx, num_layers, queries, new, entries, seen or new[-1] + 1, 1.0)


def two_turns(
    model: PreTrainedModel, method: Method, num_decode: int = 7
) -> tuple[list[int], TurnResult, TurnResult]:
    """Runs two turns; returns all tokens fed, and both turns' results."""
    prompt = random_tokens(3, 47)
    state = ReferenceState(model, method)
    first = state.turn(prompt, num_decode)
    question = [first.tokens[-1], *random_tokens(4, 18)]
    second = state.turn(question, num_decode)
    return [*prompt, *first.tokens[:-1], *question, *second.tokens[:-1]], first, second


# Parts


def test_margins() -> None:
    assert margin([8.0, 6.0, 3.0], [0, 1]) == 0.5
    assert margin([8.0, 6.0, 6.0], [0, 1, 7]) == 0.25  # a tie is no gap, 8 against 6 is one
    assert margin([8.0, 6.0], [0, 1]) == inf
    assert margin([8.0, 6.0, 3.0], [0, 2], [2]) == 0.25  # 3 was not chosen over 6
    assert margin([8.0, 6.0, 3.0], [0, 1], [2]) == inf
    assert margin([1.0, -1.0, -2.0], [0, 1], scale=4.0) == 0.25


# PyramidKV


@pytest.mark.parametrize(
    ("mean", "most", "num_layers", "beta", "floor", "expected"),
    [
        (8, 18, 4, 4, 0, [14, 10, 6, 2]),  # 8 * 3 * 3 / 12 = 6 above, 8 * 3 * 1 / 12 = 2 above
        (8, 18, 5, 4, 0, [14, 11, 8, 5, 2]),
        (7, 10, 4, 4, 0, [10, 8, 6, 4]),  # 5 above would be 12 of 10 there are
        (7, 30, 4, 20, 0, [13, 9, 5, 1]),  # 6.65 and 2.22 above, rounded down
        (9, 9, 3, 20, 0, [9, 9, 9]),
        (9, 30, 3, 1, 0, [9, 9, 9]),
        (0, 30, 3, 20, 0, [0, 0, 0]),
        (9, 30, 1, 20, 0, [9]),
        (9, 30, 2, 3, 0, [15, 3]),
        (7, 1000, 4, 20, 1, [13, 9, 5, 1]),  # as without a floor: 6.65 above
        (7, 1000, 4, 20, 4, [10, 8, 6, 4]),
        (8, 1000, 4, 20, 4, [12, 9, 7, 4]),  # 4 * 1 // 3 = 1
        (4, 1000, 4, 20, 4, [4, 4, 4, 4]),
        (3, 1000, 4, 20, 4, [3, 3, 3, 3]),
        (0, 1000, 4, 20, 4, [0, 0, 0, 0]),
        (80, 1000, 4, 20, 4, [156, 105, 55, 4]),  # 80 * 19 // 20 = 76 above
        (100, 1000, 4, 20, 4, [195, 131, 69, 5]),  # 95 above leaves 5
    ],
)
def test_free_places(
    mean: int, most: int, num_layers: int, beta: int, floor: int, expected: list[int]
) -> None:
    assert free_places(mean, most, num_layers, beta, floor) == expected


@pytest.mark.parametrize("num_layers", [1, 5])
@pytest.mark.parametrize("protect", [0, 3])
def test_pyramid_kv_divides_snapkvs_total(num_layers: int, protect: int) -> None:
    model = tiny_model("llama", seed=5, num_layers=num_layers)
    prompt = random_tokens(2, 53)
    method = PyramidKV(0.3, window_size=4, kernel_size=3, protect=protect)
    turn = ReferenceState(model, method).turn(prompt, 0)
    lens = [len(layer[0]) for layer in turn.kept]
    assert sum(lens) == num_layers * 15  # int(53 * 0.3)
    assert num_layers == 1 or lens[0] > lens[-1]
    assert lens == sorted(lens, reverse=True)
    for layer, count in enumerate(lens):
        same_count = SnapKV(
            retention_tokens=count, window_size=4, kernel_size=3, protect=protect
        )  # all layers see the whole prompt, so each chooses as it would under any other's budget
        assert turn.kept[layer] == ReferenceState(model, same_count).turn(prompt, 0).kept[layer]


# AdaKV


def test_share_breaks_ties_by_head_then_token() -> None:
    even = [[0.25] * 4, [0.25] * 4, [0.25] * 4]
    assert share(even, [[], [], []], 2, 0.0) == ([[0, 1, 2, 3], [0, 1], []], inf)
    assert share(even, [[], [0], []], 2, 0.5) == ([[0, 1, 2, 3], [1], [0]], inf)
    assert share(even, [[0], [], []], 1, 1.0) == ([[1], [0], [0]], inf)
    assert share([[0.5, 0.2], [], [0.1]], [[], [], []], 1, 0.0) == ([[0, 1], [], [0]], inf)


def test_a_heads_floor_rounds_down() -> None:
    scores = [[0.9, 0.8, 0.7, 0.6, 0.5], [0.3, 0.2, 0.1, 0.05]]
    assert share(scores, [[], []], 3, 0.5)[0] == [[0, 1, 2, 3, 4], [0]]
    assert share(scores, [[], []], 3, 0.7)[0] == [[0, 1, 2, 3], [0, 1]]


def test_margin_of_a_share() -> None:
    """The margin is measured between tokens that could have changed places."""
    scores = [[0.8, 0.1, 0.05], [0.4, 0.3, 0.2]]
    taken, gap = share(scores, [[], []], 1, 0.0)
    assert taken == [[0], [0]]
    assert gap == pytest.approx(0.25)  # 0.4 against 0.3 in the ranking of all
    taken, gap = share(scores, [[], []], 2, 0.5)
    assert taken == [[0], [0, 1, 2]]
    assert gap == pytest.approx(0.5)  # 0.2 against 0.1, of another head
    taken, gap = share(scores, [[], []], 2, 1.0)
    assert taken == [[0, 1], [0, 1]]
    assert gap == pytest.approx(1 / 3)  # 0.3 against 0.2; 0.1 against 0.2 does not compete
    taken, gap = share(scores, [[], [1]], 2, 1.0)
    assert taken == [[0, 1], [0, 2]]
    assert gap == pytest.approx(0.5)  # 0.1 against 0.05


@pytest.mark.parametrize("family", FAMILIES)
def test_ada_kv_follows_from_the_models_own_attention(family: Family) -> None:
    """Tensor operations on Transformers' attention make the same choices."""
    model = tiny_model(family, seed=6, attn_implementation="eager")
    prompt = random_tokens(11, 53)
    with torch.no_grad():
        attentions = model(torch.tensor([prompt]), output_attentions=True).attentions
    method = AdaKV(0.3, window_size=5, kernel_size=3, floor=0.35, protect=2)
    turn = ReferenceState(model, method).turn(prompt, 0)
    always = [0, 1, *range(48, 53)]
    for layer, probabilities in enumerate(attentions):
        sums = probabilities[0, :, -5:, :-5].sum(1)  # [query_heads, key_len - window]
        pooled = torch.nn.functional.max_pool1d(sums[None], 3, stride=1, padding=1)[0]
        scores = pooled.view(2, 3, 48).mean(1)
        scores[:, :2] = -1.0
        taken = torch.zeros(2, 48, dtype=torch.bool)
        for head in range(2):  # int(53 * 0.3) - 7 = 8 free places, int(8 * 0.35) = 2 for itself
            taken[head, scores[head].argsort(descending=True, stable=True)[:2]] = True
        rest = scores.masked_fill(taken, -1.0).flatten()
        taken.view(-1)[rest.argsort(descending=True, stable=True)[:12]] = True
        for held, chosen in zip(turn.kept[layer], taken, strict=True):
            assert held == sorted([*always, *chosen.nonzero()[:, 0].tolist()])
    assert any(len(layer[0]) != len(layer[1]) for layer in turn.kept)


def test_totals_of_ada_kv_over_two_turns() -> None:
    """Heads share a layer's budget, even if they held different numbers before."""
    model = tiny_model("qwen3", seed=2)
    _, first, second = two_turns(model, AdaKV(0.3, window_size=3, kernel_size=3))
    for turn, count in ((first, 14), (second, 21)):  # int(47 * 0.3), int(73 * 0.3)
        for layer in turn.kept:
            assert sum(map(len, layer)) == 2 * count
            assert all(set(range(turn.end - 3, turn.end)) <= set(held) for held in layer)
        assert any(len(layer[0]) != len(layer[1]) for layer in turn.kept)


OF_THREE = {"window_size": 3, "kernel_size": 3, "protect": 2}


@pytest.mark.parametrize(
    ("family", "method", "same"),
    [
        ("mistral", AdaKV(0.3, floor=1.0, **OF_THREE), SnapKV(0.3, **OF_THREE)),
        (
            "qwen2",
            Staged(0.2, stages=((2, 0.35),), **OF_THREE),
            FastKV(0.2, tsp_layer=2, tsp_rate=0.35, **OF_THREE),
        ),
    ],
)
def test_a_floor_of_one_is_snapkv_and_one_stage_is_fastkv(
    family: Family, method: Method, same: Method
) -> None:
    model = tiny_model(family, seed=3)
    ours, theirs = two_turns(model, method), two_turns(model, same)
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        assert (one.kept, one.reached, one.margin) == (other.kept, other.reached, other.margin)
        assert torch.equal(one.logits, other.logits)


# Stages


def test_staged_over_two_turns() -> None:
    """Rates count all tokens seen; a layer keeps its budget or all tokens that reached it."""
    model = tiny_model("llama", seed=2, num_layers=6)
    method = Staged(0.3, window_size=3, kernel_size=3, stages=((1, 0.5), (3, 0.2)))
    _, first, second = two_turns(model, method)
    assert [len(reached) for reached in first.reached] == [47, 47, 23, 23, 9, 9]
    assert [len(layer[0]) for layer in first.kept] == [14] * 4 + [9] * 2
    # The second turn: int(73 * 0.5) = 36 of 19 new tokens, int(73 * 0.2) = 14 of them.
    assert [len(reached) for reached in second.reached] == [19] * 4 + [14] * 2
    assert list(second.propagated) == [3]
    for turn in (first, second):
        for earlier, later in zip(turn.reached, turn.reached[1:], strict=False):
            assert set(later) <= set(earlier)
            assert set(range(turn.end - 3, turn.end)) <= set(later)
    assert {layer: len(passed) for layer, passed in first.propagated.items()} == {1: 23, 3: 9}


# Protected tokens


def test_protected_tokens_are_no_part_of_the_margin() -> None:
    """A protected token's score does not make a dropped one a near tie."""
    layer = giving([[0.11, 0.3, 0.109, 0.2, 0.1, 0.181]], [list(range(6))], 6, layer_idx=1)
    method = FastKV(None, 1, 1, retention_tokens=4, tsp_tokens=4, tsp_layer=1, protect=1)
    choice = method.choose(layer)
    assert (choice.kept, choice.passed) == ([[0, 1, 3, 5]], [0, 1, 3, 5])
    assert choice.margin == pytest.approx((0.2 - 0.109) / 0.2)


@pytest.mark.parametrize("method", PROTECTS, ids=str)
def test_what_is_protected_stays(method: SnapKV | StreamingLLM | GemFilter) -> None:
    assert method.protect > 0
    protected = list(range(method.protect))
    _, first, second = two_turns(tiny_model("llama", seed=4), method)
    for turn in (first, second):
        assert all(held[: len(protected)] == protected for layer in turn.kept for held in layer)
    assert all(reached[: len(protected)] == protected for reached in first.reached)


# GemFilter


def gem_view(products: list[list[float]], new_len: int, seen: int) -> LayerView:
    """Returns a layer of two query heads and one KV head, with given products of the last query."""
    keys = [torch.tensor([first, second, 0.0]) for first, second in zip(*products, strict=True)]
    held = len(keys) - new_len
    at = [*range(held), *range(seen - new_len, seen)]
    entries = [[Entry(*pair, torch.zeros(3)) for pair in zip(at, keys, strict=True)]]
    # Earlier queries differ, so that taking another than the last one shows.
    queries = [
        torch.tensor([[9.0, -9.0, 9.0]] * (new_len - 1) + [last])
        for last in ([1.0, 0.0, 0.0], [0.0, 1.0, 0.0])
    ]
    return LayerView(1, 4, queries, at[held:], entries, seen, 0.125)


def test_gem_filter_by_hand() -> None:
    # The means are 1, -2, 0, 4, 3, 0; pooled over three, times three: -1, -1, 2, 7, 7, (3).
    products = [[2.0, -4.0, 3.0, 6.0, 1.0, -5.0], [0.0, 0.0, -3.0, 2.0, 5.0, 5.0]]
    view = gem_view(products, 6, 6)

    def chosen(tokens: int, protect: int = 0, kernel_size: int = 3) -> list[int]:
        return GemFilter(
            kernel_size=kernel_size, retention_tokens=tokens, protect=protect
        ).restart_on(view)[0]

    assert chosen(1) == [5]
    assert chosen(2) == [3, 5]  # of two sevens the earlier
    assert chosen(4) == [2, 3, 4, 5]
    assert chosen(5) == [0, 2, 3, 4, 5]  # of two below zero the earlier
    assert chosen(9) == [0, 1, 2, 3, 4, 5]
    assert chosen(3, kernel_size=1) == [3, 4, 5]
    assert chosen(4, kernel_size=1) == [0, 3, 4, 5]
    assert chosen(3, protect=1) == [0, 3, 5]
    assert chosen(1, protect=2) == [0, 1, 5]
    assert chosen(1, protect=6) == [0, 1, 2, 3, 4, 5]
    assert GemFilter(retention_rate=0.5).restart_on(view)[0][-1] == 5
    assert GemFilter(retention_rate=0.1).restart_on(view)[0] == [5]


def test_gem_filter_chooses_among_new_tokens_by_all_keys() -> None:
    """Held keys take part in pooling but cannot be chosen; rates count all tokens seen."""
    products = [[0.0, 9.0, 0.0, 2.0, 5.0, 0.0]] * 2  # two held, four new
    view = gem_view(products, 4, 10)
    # Pooled over three, times three: (9), (9), 11, 7, 7, (5).
    assert GemFilter(retention_rate=0.2, kernel_size=3).restart_on(view)[0] == [0, 3]
    assert GemFilter(retention_rate=0.2, kernel_size=1).restart_on(view)[0] == [2, 3]
    assert GemFilter(retention_rate=0.4, kernel_size=1).restart_on(view)[0] == [0, 1, 2, 3]
    assert GemFilter(retention_rate=0.1, protect=4).restart_on(view)[0] == [3]  # 6 to 9 are new


def test_gem_filters_margin_is_relative_to_the_largest_product() -> None:
    products = [[10.0, -20.0, 3.0, 8.0, 0.0], [0.0, 12.0, 3.0, 0.0, 0.0]]  # means 5, -4, 3, 4
    method = GemFilter(kernel_size=1, retention_tokens=2)
    chosen, gap = method.restart_on(gem_view(products, 5, 5))
    assert chosen == [0, 4]
    assert gap == pytest.approx(1 / 20)
    alone = GemFilter(kernel_size=1, retention_tokens=2, protect=1)
    assert alone.restart_on(gem_view(products, 5, 5)) == ([0, 4], inf)


GEM_FILTERS = [
    GemFilter(retention_rate=0.3),
    GemFilter(filter_layer=0, retention_rate=0.2, kernel_size=3),
    GemFilter(filter_layer=3, retention_tokens=8, kernel_size=1, protect=3),
]


@pytest.mark.parametrize("method", GEM_FILTERS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_chosen_tokens_are_a_row_of_their_own(family: Family, method: GemFilter) -> None:
    """Both turns equal dense causal attention over the chosen and decoded tokens alone."""
    model = tiny_model(family, seed=9)
    row, first, second = two_turns(model, method)
    held = second.kept[0][0] + list(range(second.end, len(row)))
    assert len(held) < len(row) - 30
    dense = dense_masked_logits(
        model, [row[position] for position in held], causal_visible(4, 6, len(held))
    )
    for turn in (first, second):
        at = held.index(turn.end - 1)
        assert max_error(turn.logits, dense[at : at + 8]) < 1e-4


def test_rotary_positions_have_no_gap() -> None:
    state = ReferenceState(tiny_model("llama", seed=1), GemFilter(retention_rate=0.2))
    first = state.turn(random_tokens(5, 40), 3)
    assert (state.seen, state.rotary) == (43, 8 + 3)
    assert all(len(held) == 11 for layer in state.positions() for held in layer)
    state.turn([first.tokens[-1], *random_tokens(6, 16)], 2)
    assert (state.seen, state.rotary) == (62, 11 + 12 + 2)  # int(60 * 0.2) = 12 of 17
    dropping = ReferenceState(tiny_model("llama", seed=1), FastKV(0.2))
    dropping.turn(random_tokens(5, 40), 3)
    assert (dropping.seen, dropping.rotary) == (43, 43)


# All of them


@pytest.mark.parametrize("method", KEEPS_ALL, ids=str)
def test_keeping_everything_equals_full_context(method: Method) -> None:
    model = tiny_model("qwen2", seed=4)
    full, ours = two_turns(model, FullContext()), two_turns(model, method)
    assert full[0] == ours[0]
    for one, other in zip(full[1:], ours[1:], strict=True):
        assert torch.equal(one.logits, other.logits)
        assert other.propagated == {}
        assert one.kept == other.kept


@pytest.mark.parametrize(
    ("family", "method"), [*product(FAMILIES, BASIC), *product(("llama", "qwen3"), EVICTS)], ids=str
)
def test_two_turns_equal_dense_masked_attention(family: Family, method: Method) -> None:
    """Eviction and dropping give the logits of masking, in both turns, prefill and decoding."""
    model = tiny_model(family, seed=9)
    row, first, second = two_turns(model, method)
    dense = dense_masked_logits(model, row, visible_after([first.act, second.act], 6, len(row)))
    for turn in (first, second):
        assert turn.margin > 0
        assert max_error(turn.logits, dense[turn.end - 1 : turn.end + 7]) < 1e-4
    full = ReferenceState(model, FullContext()).turn(row[:47], 7, forced=first.tokens[:-1])
    assert max_error(first.decode_logits, full.decode_logits) > 0.1  # what was evicted mattered
