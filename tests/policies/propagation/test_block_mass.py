"""Blocks that hold a share of the saliency: on paper, and at the limits."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kvpolicy import LayerContext
from kvpolicy.policies import BlockMassPropagation, UniPrefill
from tests.contexts import layer_context, of_new
from tests.policies.views import passed_by

# Masses 0.5, 0.1, 0.3, 0.1 of blocks of two, and a last token of 0.
SALIENCY = [0.4, 0.1, 0.0, 0.1, 0.15, 0.15, 0.1, 0.0, 0.0]
OTHER = [0.0, 0.0, 0.9, 0.9, 0.0, 0.0, 0.0, 0.0, 0.0]


def layer(*rows: list[float], **changes: Any) -> tuple[Tensor, LayerContext]:
    """Saliencies of two KV heads, of which a mean is taken, and a layer of as many tokens."""
    keys = torch.zeros(1, 2, len(rows[0]), 3)
    return torch.tensor([rows]), layer_context(keys, layer_idx=1, num_layers=4, **changes)


def part_of(mass: float, num_sinks: int = 0, window_size: int = 1) -> BlockMassPropagation:
    return BlockMassPropagation(
        tsp_layers=(1,), mass=mass, chunk_size=2, protect=num_sinks, window_size=window_size
    )


@pytest.mark.parametrize(
    ("part", "rows", "expected"),
    [
        (part_of(0.3), [SALIENCY, SALIENCY], [0, 1, 8]),
        # The block in which 0.6 is reached goes on too; of two of 0.1 the earlier.
        (part_of(0.6), [SALIENCY, SALIENCY], [0, 1, 4, 5, 8]),
        (part_of(0.85), [SALIENCY, SALIENCY], [0, 1, 2, 3, 4, 5, 8]),
        # The mean over heads counts.
        (part_of(0.5), [SALIENCY, OTHER], [2, 3, 8]),
        # First and last tokens go on singly.
        (part_of(0.5, 3, 2), [[0.0] * 4 + [1.0] * 2 + [0.0] * 3, [0.0] * 9], [0, 1, 2, 4, 5, 7, 8]),
        # Everything goes on where the mass asks for it or nothing is salient.
        (part_of(1.0), [SALIENCY, SALIENCY], None),
        (part_of(0.5), [[0.0] * 9] * 2, None),
        (part_of(0.5), [[-each for each in SALIENCY]] * 2, None),
    ],
)
def test_on_paper(
    part: BlockMassPropagation, rows: list[list[float]], expected: list[int] | None
) -> None:
    assert passed_by(part, *layer(*rows)) == (None if expected is None else [expected])


def test_in_a_later_turn_blocks_are_of_new_tokens() -> None:
    """Three held tokens, of which nothing counts; the sinks are not among the new."""
    rows = [9.0, 9.0, 9.0, 0.0, 0.1, 0.6, 0.0, 0.2, 0.0]
    positions = torch.tensor([0, 1, 7, *range(10, 16)]).expand(1, 2, 9)
    saliency, context = layer(rows, rows, positions=positions, new_valid=of_new(6), seen_len=(16,))
    assert passed_by(part_of(0.5, num_sinks=8), saliency, context) == [[2, 3, 5]]


def test_a_blocks_share_of_the_mean_over_heads() -> None:
    ranking = part_of(0.5).ranking(*layer(SALIENCY, OTHER))[0].tolist()
    assert ranking[::2] == pytest.approx([0.5 / 2.8, 1.9 / 2.8, 0.3 / 2.8, 0.1 / 2.8, 0.0])


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
