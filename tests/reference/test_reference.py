"""Tests the parts of the slow reference by hand, and its models.

The rest of it is held against `PolicyCache` method by method and state by state, and `PolicyCache`
against Transformers and dense attention: see `tests/integrations/forward/test_invariants.py`.
"""

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any, cast

import pytest
import torch
from transformers import PreTrainedModel

from tests.reference import (
    FAMILIES,
    PAD_TOKEN_ID,
    Act,
    FullContext,
    GemFilter,
    ReferenceState,
    SnapKV,
    random_tokens,
    tiny_model,
    visible_after,
)
from tests.reference.attention import Entry
from tests.reference.head_budgets import share
from tests.reference.hybrid import HybridState
from tests.reference.indexed import IndexedState
from tests.reference.latent import LatentState
from tests.reference.methods import LayerView
from tests.reference.mixed_models import HAS_INDEXERS, hybrid_model, indexed_model, latent_model
from tests.reference.selection import margin

STATES: dict[str, tuple[Callable[..., PreTrainedModel], type[ReferenceState]]] = {
    **{family: (partial(tiny_model, family), ReferenceState) for family in FAMILIES},
    "latent": (latent_model, LatentState),
    "hybrid": (hybrid_model, HybridState),
}
if HAS_INDEXERS:
    STATES["indexed"] = (indexed_model, IndexedState)


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


@pytest.mark.parametrize("name", STATES)
def test_two_turns_in_full_equal_one_forward(name: str) -> None:
    """Logits are neither degenerate nor large, so that a difference shows."""
    build, state_class = STATES[name]
    model = build(seed=3)
    state = state_class(model, FullContext())
    prompt, question = random_tokens(5, 43), random_tokens(9, 17)
    first, second = state.turn(prompt, 6), state.turn(question, 6)
    row = [*prompt, *first.tokens[:-1], *question, *second.tokens[:-1]]
    with torch.no_grad():
        theirs = cast(Any, model)(torch.tensor([row]), use_cache=False).logits[0]
    for turn in (first, second):
        assert (turn.logits - theirs[turn.end - 1 : turn.end + 6]).abs().max() < 1e-4
        assert 0.5 < float(turn.logits.std()) < 4
        assert float(turn.logits.abs().max()) < 12
    assert len(set(first.tokens)) > 2


@pytest.mark.parametrize("name", [name for name in STATES if name != "indexed"])
def test_choices_follow_from_the_models_own_attention(name: str) -> None:
    """That is peaked, and every KV head keeps tokens of its own.

    Models with an indexer are left out: there, methods are shown more than a query attends to.
    """
    build, state_class = STATES[name]
    model, prompt = build(seed=6, attn_implementation="eager"), random_tokens(11, 53)
    turn = state_class(model, SnapKV(0.3, window_size=5, kernel_size=3)).turn(prompt, 0)
    assert turn.margin > 0
    with torch.no_grad():
        output = cast(Any, model)(torch.tensor([prompt]), output_attentions=True)
    holding = [layer for layer in turn.kept if layer]
    for kept, attention in zip(holding, output.attentions, strict=True):
        assert float(attention[0, :, 10:].amax(-1).median()) > 0.25
        assert len({tuple(head) for head in kept}) == len(kept)
        sums = attention[0, :, -5:, :-5].sum(1)  # [query_heads, key_len - window]
        pooled = torch.nn.functional.max_pool1d(sums[None], 3, stride=1, padding=1)[0]
        for positions, scores in zip(kept, pooled.view(len(kept), -1, 48).mean(1), strict=True):
            order = scores.argsort(descending=True, stable=True)[:10]  # int(53 * 0.3) - 5
            assert positions == [*order.sort().values.tolist(), *range(48, 53)]


def test_models_leave_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    one, other = (
        tiny_model("llama", seed=0, attn_implementation=each) for each in ("sdpa", "eager")
    )
    assert torch.equal(before, torch.get_rng_state())
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert PAD_TOKEN_ID not in random_tokens(0, 500)
    assert one.get_input_embeddings().weight[PAD_TOKEN_ID].abs().max() > 0.1


def test_margins() -> None:
    assert margin([8.0, 6.0, 3.0], [0, 1]) == 0.5
    assert margin([8.0, 6.0, 6.0], [0, 1, 7]) == 0.25  # a tie is no gap, 8 against 6 is one
    assert margin([8.0, 6.0], [0, 1]) == inf
    assert margin([8.0, 6.0, 3.0], [0, 2], [2]) == 0.25  # 3 was not chosen over 6
    assert margin([8.0, 6.0, 3.0], [0, 1], [2]) == inf
    assert margin([1.0, -1.0, -2.0], [0, 1], scale=4.0) == 0.25


def test_shares_of_heads() -> None:
    """Ties go by head, then token; the margin is between tokens that could change places."""
    even = [[0.25] * 4, [0.25] * 4, [0.25] * 4]
    assert share(even, [[], [], []], 2, 0.0) == ([[0, 1, 2, 3], [0, 1], []], inf)
    assert share(even, [[], [0], []], 2, 0.5) == ([[0, 1, 2, 3], [1], [0]], inf)
    assert share(even, [[0], [], []], 1, 1.0) == ([[1], [0], [0]], inf)
    assert share([[0.5, 0.2], [], [0.1]], [[], [], []], 1, 0.0) == ([[0, 1], [], [0]], inf)
    falling = [[0.9, 0.8, 0.7, 0.6, 0.5], [0.3, 0.2, 0.1, 0.05]]
    assert share(falling, [[], []], 3, 0.5)[0] == [[0, 1, 2, 3, 4], [0]]
    assert share(falling, [[], []], 3, 0.7)[0] == [[0, 1, 2, 3], [0, 1]]
    scores = [[0.8, 0.1, 0.05], [0.4, 0.3, 0.2]]
    for exempt, free, floor, expected, gap in [
        ([[], []], 1, 0.0, [[0], [0]], 0.25),  # 0.4 against 0.3 in the ranking of all
        ([[], []], 2, 0.5, [[0], [0, 1, 2]], 0.5),  # 0.2 against 0.1, of another head
        ([[], []], 2, 1.0, [[0, 1], [0, 1]], 1 / 3),  # 0.1 against 0.2 does not compete
        ([[], [1]], 2, 1.0, [[0, 1], [0, 2]], 0.5),  # 0.1 against 0.05
    ]:
        assert share(scores, exempt, free, floor) == (expected, pytest.approx(gap))


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
    """The margin is relative to the largest product."""
    # The means are 1, -2, 0, 4, 3, 0; pooled over three, times three: -1, -1, 2, 7, 7, (3).
    products = [[2.0, -4.0, 3.0, 6.0, 1.0, -5.0], [0.0, 0.0, -3.0, 2.0, 5.0, 5.0]]
    for tokens, protect, kernel_size, expected in [
        (1, 0, 3, [5]),
        (2, 0, 3, [3, 5]),  # of two sevens the earlier
        (4, 0, 3, [2, 3, 4, 5]),
        (5, 0, 3, [0, 2, 3, 4, 5]),  # of two below zero the earlier
        (9, 0, 3, [0, 1, 2, 3, 4, 5]),
        (3, 0, 1, [3, 4, 5]),
        (4, 0, 1, [0, 3, 4, 5]),
        (3, 1, 3, [0, 3, 5]),
        (1, 2, 3, [0, 1, 5]),
        (1, 6, 3, [0, 1, 2, 3, 4, 5]),
    ]:
        method = GemFilter(None, None, kernel_size, tokens, protect=protect)
        assert method.restart_on(gem_view(products, 6, 6))[0] == expected
    assert GemFilter(None, 0.5).restart_on(gem_view(products, 6, 6))[0][-1] == 5
    assert GemFilter(None, 0.1).restart_on(gem_view(products, 6, 6))[0] == [5]
    products = [[10.0, -20.0, 3.0, 8.0, 0.0], [0.0, 12.0, 3.0, 0.0, 0.0]]  # means 5, -4, 3, 4
    found = GemFilter(None, None, 1, 2).restart_on(gem_view(products, 5, 5))
    assert found == ([0, 4], pytest.approx(1 / 20))
    alone = GemFilter(None, None, 1, 2, protect=1)
    assert alone.restart_on(gem_view(products, 5, 5)) == ([0, 4], inf)
    # Held keys take part in pooling but cannot be chosen; rates count all tokens seen. Pooled over
    # three, times three: (9), (9), 11, 7, 7, (5).
    view = gem_view([[0.0, 9.0, 0.0, 2.0, 5.0, 0.0]] * 2, 4, 10)  # two held, four new
    assert GemFilter(None, 0.2, 3).restart_on(view)[0] == [0, 3]
    assert GemFilter(None, 0.2, 1).restart_on(view)[0] == [2, 3]
    assert GemFilter(None, 0.4, 1).restart_on(view)[0] == [0, 1, 2, 3]
    assert GemFilter(None, 0.1, protect=4).restart_on(view)[0] == [3]  # 6 to 9 are new
