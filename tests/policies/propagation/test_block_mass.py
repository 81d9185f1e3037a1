"""Blocks that hold a share of the saliency: on paper, against slow loops, at the limits."""

from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from kvpolicy import CachePolicy, LayerContext
from kvpolicy.policies import (
    BlockMassPropagation,
    KeepAllSelector,
    UniPrefill,
    WindowAttentionScorer,
)
from tests import reference
from tests.contexts import layer_context, of_new
from tests.policies.scorers.support import random_layer
from tests.policies.views import new_of, view_of

# Masses 0.5, 0.1, 0.3, 0.1 of blocks of two, and a last token of 0.
SALIENCY = [0.4, 0.1, 0.0, 0.1, 0.15, 0.15, 0.1, 0.0, 0.0]


def layer(*rows: list[float], **changes: Any) -> tuple[Tensor, LayerContext]:
    """Saliencies of two KV heads, of which a mean is taken, and a layer of as many tokens."""
    keys = torch.zeros(1, 2, len(rows[0]), 3)
    return torch.tensor([rows]), layer_context(keys, layer_idx=1, num_layers=4, **changes)


def passed_on(part: BlockMassPropagation, saliency: Tensor, context: LayerContext) -> list[int]:
    passed = part.propagate(saliency, context)
    assert passed is not None
    found: list[int] = passed[0].tolist()
    return found


def part_of(mass: float, num_sinks: int = 0, window_size: int = 1) -> BlockMassPropagation:
    return BlockMassPropagation(
        tsp_layers=(1,), mass=mass, chunk_size=2, protect=num_sinks, window_size=window_size
    )


@pytest.mark.parametrize(
    ("mass", "expected"),
    [
        (0.3, [0, 1, 8]),
        (0.6, [0, 1, 4, 5, 8]),  # the block in which 0.6 is reached goes on too
        (0.85, [0, 1, 2, 3, 4, 5, 8]),  # of two of 0.1 the earlier
    ],
)
def test_on_paper(mass: float, expected: list[int]) -> None:
    saliency, context = layer(SALIENCY, SALIENCY)
    assert passed_on(part_of(mass), saliency, context) == expected


def test_the_mean_over_heads_counts() -> None:
    other = [0.0, 0.0, 0.9, 0.9, 0.0, 0.0, 0.0, 0.0, 0.0]
    saliency, context = layer(SALIENCY, other)
    assert passed_on(part_of(0.5), saliency, context) == [2, 3, 8]
    ranking = part_of(0.5).ranking(saliency, context)[0].tolist()
    assert ranking[::2] == pytest.approx([0.5 / 2.8, 1.9 / 2.8, 0.3 / 2.8, 0.1 / 2.8, 0.0])


def test_first_and_last_tokens_go_on_singly() -> None:
    saliency, context = layer([0.0] * 4 + [1.0] * 2 + [0.0] * 3, [0.0] * 9)
    assert passed_on(part_of(0.5, 3, 2), saliency, context) == [0, 1, 2, 4, 5, 7, 8]


def test_everything_goes_on_where_the_mass_asks_for_it_or_nothing_is_salient() -> None:
    saliency, context = layer(SALIENCY, SALIENCY)
    assert part_of(1.0).propagate(saliency, context) is None
    assert part_of(0.5).propagate(torch.zeros_like(saliency), context) is None
    assert part_of(0.5).propagate(-saliency, context) is None


def test_in_a_later_turn_blocks_are_of_new_tokens() -> None:
    """Three held tokens, of which nothing counts; the sinks are not among the new."""
    rows = [9.0, 9.0, 9.0, 0.0, 0.1, 0.6, 0.0, 0.2, 0.0]
    positions = torch.tensor([0, 1, 7, *range(10, 16)]).expand(1, 2, 9)
    saliency, context = layer(rows, rows, positions=positions, new_valid=of_new(6), seen_len=(16,))
    assert passed_on(part_of(0.5, num_sinks=8), saliency, context) == [2, 3, 5]


@pytest.mark.parametrize("mass", [0.2, 0.6, 0.9, 0.97])
@pytest.mark.parametrize("block_size", [1, 4, 7])
def test_against_slow_loops_in_padded_rows(mass: float, block_size: int) -> None:
    lens = (41, 17, 3, 30)
    context = attrs.evolve(random_layer(block_size, lens, query_len=5), num_layers=3)
    part = BlockMassPropagation(
        tsp_layers=(1,), mass=mass, chunk_size=block_size, protect=2, window_size=5
    )
    method = reference.UniPrefill((1,), mass, block_size, num_sinks=2, window_size=5)
    policy = CachePolicy(WindowAttentionScorer(5), KeepAllSelector(), part)
    passed = policy.decide(context).passed_on
    for row, length in enumerate(lens):
        choice = method.choose(view_of(context, row))
        assert choice.margin > 1e-6
        found = list(range(length)) if passed is None else new_of(passed[row], context, row)
        assert found == choice.passed


@pytest.mark.parametrize(
    ("num_layers", "layers"),
    [(32, {7, 11, 15, 19, 23, 27}), (48, {11, 17, 23, 29, 35, 41}), (4, {0, 1, 2}), (1, {0})],
)
def test_default_layers(num_layers: int, layers: set[int]) -> None:
    assert BlockMassPropagation().acting_layers(num_layers) == layers


def test_open_layers_take_the_nearest_that_can_drop() -> None:
    every_sixth = range(5, 48, 6)
    placed = BlockMassPropagation().placed(48, every_sixth)
    assert placed.acting_layers(48) == {11, 17, 23, 29, 35, 41}
    every_fourth = BlockMassPropagation().placed(48, range(3, 48, 4))
    assert every_fourth.acting_layers(48) == {11, 19, 23, 31, 35, 43}
    assert BlockMassPropagation(tsp_layers=(2,)).placed(4, [1]).acting_layers(4) == {2}


def test_how_much_goes_on_is_not_known_beforehand() -> None:
    assert BlockMassPropagation().decides_by_content
    assert BlockMassPropagation().layer_rates(8) == [1.0] * 8
    with pytest.raises(ValueError, match="must not decide by content"):
        UniPrefill().prefill_compute_rate(32)
