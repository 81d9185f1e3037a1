"""Propagation that drops among the tokens of images only, and FastV, against plain Python."""

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from kvpolicy import CachePolicy, LayerContext, TokenKind
from kvpolicy.policies import (
    FastV,
    KeepAllSelector,
    LastQueryScorer,
    StagedPropagation,
    VisualTokenPropagation,
)
from kvpolicy.testing import layer_contexts
from tests.contexts import layer_context, of_new
from tests.policies.views import new_of, passed_by, view_of
from tests.reference.droppers import window_means
from tests.reference.selection import highest, margin

TEXT, IMAGE, VIDEO, AUDIO = TokenKind


def layer_of(kinds: Sequence[Sequence[TokenKind]] | None, *, new: int = 8) -> LayerContext:
    """One row, one KV head, eight keys; ``kinds`` of the one head's keys."""
    return layer_context(
        torch.zeros(1, 1, 8, 3),
        layer_idx=1,
        num_layers=4,
        new_valid=of_new(new),
        kinds=None if kinds is None else torch.tensor([kinds], dtype=torch.int8),
    )


SALIENCY = torch.tensor([[[0.0, 0.3, 0.1, 0.2, 0.0, 0.4, 0.0, 0.0]]])


MIXED = [[TEXT, IMAGE, IMAGE, IMAGE, TEXT, VIDEO, AUDIO, TEXT]]


@pytest.mark.parametrize(
    ("kinds", "settings", "new", "expected"),
    [
        (MIXED, {"tsp_rate": 0.5}, 8, [[0, 1, 4, 5, 6, 7]]),  # 2 of 4 image tokens: 0.3 and 0.4
        (MIXED, {"tsp_rate": 0.75}, 8, [[0, 1, 3, 4, 5, 6, 7]]),
        (MIXED, {"tsp_rate": 0.25}, 8, [[0, 4, 5, 6, 7]]),
        (MIXED, {"tsp_rate": 0.1}, 8, [[0, 4, 6, 7]]),  # int(0.4): none
        # The last two image tokens go on whatever they score, and are the half of four.
        (
            [[TEXT, IMAGE, IMAGE, TEXT, TEXT, TEXT, IMAGE, IMAGE]],
            {"tsp_rate": 0.5, "window_size": 2},
            8,
            [[0, 3, 4, 5, 6, 7]],
        ),
        # Text only; and a later turn without an image, whose earlier ones are held as they are.
        (None, {"tsp_rate": 0.1}, 3, None),
        ([[TEXT] * 8], {"tsp_rate": 0.1}, 3, None),
        ([[IMAGE] * 5 + [TEXT] * 3], {"tsp_rate": 0.1}, 3, None),
    ],
)
def test_on_paper(kinds: Any, settings: Any, new: int, expected: list[list[int]] | None) -> None:
    part = VisualTokenPropagation(tsp_layer=1, **settings)
    assert passed_by(part, SALIENCY, layer_of(kinds, new=new)) == expected


def test_stages_multiply() -> None:
    """A half, then a half of what is left: 8 image tokens, 4, 2."""
    stages = StagedPropagation(
        [VisualTokenPropagation(tsp_layer=layer, tsp_rate=0.5) for layer in (0, 1)]
    )
    saliency = torch.arange(9.0)[None, None]
    kinds = torch.tensor([[[IMAGE] * 8 + [TEXT]]], dtype=torch.int8)
    for layer_idx, start, expected in ((0, 0, [4, 5, 6, 7, 8]), (1, 4, [2, 3, 4])):
        context = layer_context(
            torch.zeros(1, 1, 9 - start, 3),
            layer_idx=layer_idx,
            num_layers=4,
            positions=torch.arange(start, 9)[None, None],
            seen_len=(9,),
            kinds=kinds[:, :, start:],
        )
        assert passed_by(stages, saliency[:, :, start:], context) == [expected]


def slow_fastv(context: LayerContext, row: int, rate: float) -> tuple[list[int], float]:
    """What goes on of one row, by the slow reference's scores, and the score gap."""
    view = view_of(context, row)
    received = window_means(view, context.query_len)
    tokens = range(len(received))
    kinds = [] if context._kinds is None else context._kinds[row, 0, -len(received) :].tolist()
    images = [at for at, kind in enumerate(kinds) if kind == IMAGE]
    last = images[-1:] if images[-1:] == [tokens[-1]] else []
    rest = images[: len(images) - len(last)]
    scores = [received[at] for at in rest]
    chosen = highest(scores, max(int(len(images) * rate), len(last)) - len(last))
    going = {rest[index] for index in chosen}
    return [at for at in tokens if at in going or at not in rest], margin(scores, chosen)


@given(context=layer_contexts(None), rate=st.sampled_from([0.1, 0.5, 0.8]))
def test_fastv_is_what_loops_give(context: LayerContext, rate: float) -> None:
    context = attrs.evolve(context, layer_idx=1, num_layers=5)
    decision = FastV(tsp_rate=rate).decide(context)
    for row in range(context.batch):
        expected, gap = slow_fastv(context, row, rate)
        assume(gap > 1e-5)
        tokens = list(range(int(context.new_valid[row].sum())))
        passed = decision.passed_on
        assert expected == (tokens if passed is None else new_of(passed[row], context, row))
        for head in range(context.kv_heads):
            kept = [slot for slot in decision.kept[row, head].tolist() if slot >= 0]
            assert kept == context.valid[row, head].nonzero().flatten().tolist()


def test_pyramid_drop_is_a_composition() -> None:
    stages = [VisualTokenPropagation(tsp_layer=layer, tsp_rate=0.5) for layer in (7, 15, 23)]
    policy = CachePolicy(LastQueryScorer(), KeepAllSelector(), StagedPropagation(stages))
    policy.check_model(32)
    assert policy.propagation.acting_layers(32) == {7, 15, 23}
    assert policy.num_queries == 1


def test_text_has_the_rate_of_the_full_context() -> None:
    assert FastV().prefill_compute_rate(32) == 1.0
