"""Tokens that any of several layers finds salient, on paper."""

from typing import Any

import attrs
import pytest
import torch

from kvpolicy.layer_inputs import LayerInputs
from kvpolicy.policies import (
    CrossLayerPropagation,
    ReplayKV,
    StagedPropagation,
    TokenSelectivePropagation,
)
from tests.contexts import layer_context
from tests.policies.views import passed_by


def layer(*rows: list[float], history: tuple[list[list[float]], ...] = ()) -> Any:
    """Saliencies of one row's KV heads, and a layer of 2 KV heads and 6 tokens at layer 1 of 4."""
    context = layer_context(
        torch.zeros(1, 2, 6, 3),
        layer_idx=1,
        num_layers=4,
        layer=LayerInputs(history=tuple(torch.tensor([each]) for each in history)),
    )
    return torch.tensor([rows]), context


OWN = ([0.1, 0.5, 0.0, 0.3, 0.2, 0.0], [0.2, 0.4, 0.1, 0.0, 0.2, 0.0])
BEFORE = [[0.0, 0.0, 0.6, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.9, 0.0]]


LOUD = [[0.0, 0.0, 0.0, 9.0, 0.0, 0.0]] * 2
OF_FOUR = {"tsp_tokens": 4, "window_size": 1, "standardize": False}
OF_THREE = {"tsp_tokens": 3, "window_size": 2, "voting_layers": 2}
# Before the window of 2: 0 0 0 4 has mean 1 and deviation sqrt 3; 100 100 102 102, 101 and 1. The
# window has no part in them: 50 in it moves nothing.
SCALES = ([0.0, 0.0, 0.0, 4.0, 50.0, 0.0],) * 2, ([[100.0, 100.0, 102.0, 102.0, 0.0, 0.0]] * 2,)
NEIGHBOURS = ([0.0, 3.0, 0.0, 0.0, 6.0, 99.0],) * 2
OF_NEIGHBOURS = {"tsp_rate": 0.5, "window_size": 1, "standardize": False}


@pytest.mark.parametrize(
    ("rows", "history", "settings", "ranking", "passed"),
    [
        # A layer before and one head are enough, if the layer votes.
        (OWN, (BEFORE,), {**OF_FOUR, "voting_layers": 2}, [0.2, 0.5, 0.6, 0.3, 0.9], [1, 2, 4, 5]),
        (OWN, (BEFORE,), {**OF_FOUR, "voting_layers": 1}, [0.2, 0.5, 0.1, 0.3, 0.2], [0, 1, 3, 5]),
        # The mean is over layers and heads.
        (
            OWN,
            (BEFORE,),
            {**OF_FOUR, "voting_layers": 2, "reduction": "mean"},
            [0.3 / 4, 0.9 / 4, 0.7 / 4, 0.3 / 4, 1.3 / 4],
            [1, 2, 4, 5],
        ),
        # Older layers than asked for have no say.
        (OWN, (LOUD, BEFORE), {**OF_FOUR, "voting_layers": 2}, None, [1, 2, 4, 5]),
        (OWN, (LOUD, BEFORE), {**OF_FOUR, "voting_layers": 3}, None, [2, 3, 4, 5]),
        # Standardized, no layer wins by its scale.
        (*SCALES, OF_THREE, [-(3**-0.5), -(3**-0.5), 1.0, 3**0.5], [3, 4, 5]),
        (*SCALES, {**OF_THREE, "standardize": False}, None, [2, 4, 5]),
        # Neighbours go on together: means of three, of the window of 1 and of what lies outside 0.
        (NEIGHBOURS, (), {**OF_NEIGHBOURS, "kernel_size": 3}, [1, 1, 1, 2, 2], [3, 4, 5]),
        (NEIGHBOURS, (), OF_NEIGHBOURS, None, [1, 4, 5]),
        # A saliency that says nothing counts as the mean.
        (
            ([0.3] * 6, [0.0, 0.0, 1.0, 0.0, 0.0, 0.0]),
            (),
            {"tsp_rate": 0.5, "window_size": 1},
            [0.0, 0.0, 2.0, 0.0, 0.0],
            [0, 2, 5],
        ),
    ],
)
def test_on_paper(
    rows: Any, history: Any, settings: Any, ranking: list[float] | None, passed: list[int]
) -> None:
    saliency, context = layer(*rows, history=history)
    part = CrossLayerPropagation(tsp_layer=1, **settings)
    if ranking is not None:
        found = part.ranking(saliency, context)[0, : len(ranking)].tolist()
        assert found == pytest.approx(ranking, rel=1e-6, abs=1e-6)
    assert passed_by(part, saliency, context) == [passed]


def test_all_layers_may_vote() -> None:
    saliency, context = layer(*OWN, history=(BEFORE,) * 9)
    part = CrossLayerPropagation(tsp_layer=1, tsp_rate=0.4, voting_layers=None)
    ten = attrs.evolve(part, voting_layers=10)
    assert torch.equal(part.ranking(saliency, context), ten.ranking(saliency, context))
    policy = ReplayKV(0.2, tsp_rate=0.4)
    assert policy.remembered_layers(8, range(8)) == {0, 1, 2}


def test_a_stage_may_ask_for_history() -> None:
    part = StagedPropagation(
        [
            CrossLayerPropagation(tsp_layer=1, tsp_rate=0.4),
            TokenSelectivePropagation(tsp_layer=2, tsp_rate=0.2),
        ]
    )
    assert part.history_layers == 3
    saliency, context = layer(*OWN, history=(BEFORE,))
    stage = CrossLayerPropagation(tsp_layer=1, tsp_rate=0.4)
    assert torch.equal(part.ranking(saliency, context), stage.ranking(saliency, context))
