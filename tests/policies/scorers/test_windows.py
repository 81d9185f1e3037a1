"""What the observation window attends to, average-pooled or not at all."""

import math

import pytest
import torch

from kvpolicy.policies import WindowAttentionScorer, WindowMaxPoolScorer, WindowMeanPoolScorer
from kvpolicy.testing import check_scorer
from tests.policies.views import view_of
from tests.reference.droppers import window_means
from tests.reference.selection import average_pool, window_saliency

from .support import random_layer

LENS = (23, 9, 2)


@pytest.mark.parametrize(("window", "kernel"), [(4, 1), (4, 3), (1, 7), (30, 3)])
def test_average_pooling_against_slow_loops_in_padded_rows(window: int, kernel: int) -> None:
    context = random_layer(window, LENS, query_len=min(window, 23))
    found = WindowMeanPoolScorer(window, kernel).score(context)
    for row, length in enumerate(LENS):
        view = view_of(context, row)
        expected = window_saliency(
            view.queries,
            view.new_positions,
            view.entries,
            window_size=window,
            kernel_size=1,
            scaling=view.scaling,
        )
        for head in range(6):
            scores = average_pool(expected[head], kernel)
            here = found[row, head, 23 - length :].tolist()
            assert here == pytest.approx([*scores, *[0.0] * min(window, length)], abs=1e-6)


def test_without_pooling_the_two_are_one() -> None:
    context = random_layer(1, LENS, query_len=4)
    mean, largest = WindowMeanPoolScorer(4, 1), WindowMaxPoolScorer(4, 1)
    torch.testing.assert_close(mean.score(context), largest.score(context))


@pytest.mark.parametrize("window", [1, 4, 30])
def test_the_window_attends_to_itself_as_well(window: int) -> None:
    context = random_layer(window, LENS, query_len=min(window, 23))
    found = WindowAttentionScorer(window).score(context)
    for row, length in enumerate(LENS):
        here = found[row, :, 23 - length :]
        expected = window_means(view_of(context, row), window)
        assert here.mean(dim=0).tolist() == pytest.approx(expected, abs=1e-6)
        assert here.sum(dim=1).tolist() == pytest.approx([1.0] * 6)
        assert math.isclose(float(found[row].sum()), 6.0, rel_tol=1e-5)


@pytest.mark.parametrize(
    "scorer",
    [WindowMeanPoolScorer(3, 5), WindowMeanPoolScorer(1, 1), WindowAttentionScorer(3)],
    ids=str,
)
def test_the_contract(scorer: WindowMeanPoolScorer) -> None:
    check_scorer(scorer)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="kernel_size must be odd"):
        WindowMeanPoolScorer(kernel_size=4)
    with pytest.raises(ValueError, match="window_size must be at least 1"):
        WindowAttentionScorer(0)
