"""What the observation window attends to, pooled by average or maximum, or not at all."""

import math
from functools import partial
from typing import Any

import attrs
import pytest
import torch

from kvpolicy import LayerContext
from kvpolicy.attention import group_mean
from kvpolicy.policies import (
    AdaKV,
    CriticalKV,
    PyramidKV,
    SnapKV,
    WindowAttentionScorer,
    WindowMaxPoolScorer,
    WindowMeanPoolScorer,
)
from tests.policies.views import view_of
from tests.reference.droppers import window_means
from tests.reference.methods import window_attention
from tests.reference.selection import average_pool, head_mean, max_pool, max_pool_peak_first

from .support import check_tokens, random_layer

LENS = (23, 9, 2)


def slow(context: LayerContext, row: int, window: int) -> list[list[float]]:
    """By query head, the window's attention to the tokens before it."""
    return window_attention(view_of(context, row), window)


# Groups are averaged before the pooling, and a token that is a peak keeps its rank.
POOLED: dict[str, tuple[Any, Any]] = {
    "average": (WindowMeanPoolScorer, average_pool),
    "groups": (partial(WindowMaxPoolScorer, group_first=True), max_pool),
    "peaks": (partial(WindowMaxPoolScorer, peak_first=True), max_pool_peak_first),
    "groups and peaks": (
        partial(WindowMaxPoolScorer, group_first=True, peak_first=True),
        max_pool_peak_first,
    ),
}


@pytest.mark.parametrize("how", POOLED)
@pytest.mark.parametrize(("window", "kernel"), [(4, 1), (4, 3), (1, 7), (30, 3)])
def test_pooling_against_slow_loops_in_padded_rows(window: int, kernel: int, how: str) -> None:
    context = random_layer(window, LENS, query_len=min(window, 23))
    build, pool = POOLED[how]

    def expected(row: int, head: int) -> list[float]:
        attention = slow(context, row, window)
        if "groups" in how:
            attention = [head_mean(attention[first : first + 2]) for first in (0, 2, 4)]
        return [*pool(attention[head], kernel), *[0.0] * min(window, LENS[row])]

    found = build(window, kernel_size=kernel).score(context)
    assert found.shape[1] == (3 if "groups" in how else 6)
    check_tokens(found, context, expected, abs=1e-6)


def test_heads_that_share_what_is_stored_are_one_group() -> None:
    """As under latent attention, where a selector is shown the mean over all heads."""
    context = random_layer(2, (23,), query_len=4)
    latent = attrs.evolve(context, stored=(context.keys[:, :1], context.values[:, :1]))
    found = WindowMaxPoolScorer(4, kernel_size=5, group_first=True).score(latent)
    attention = (
        WindowMaxPoolScorer(4, kernel_size=1).score(context)[0].mean(dim=0)[: 23 - 4].tolist()
    )
    for head in range(3):
        assert found[0, head].tolist() == pytest.approx([*max_pool(attention, 5), *[0.0] * 4])


def test_either_order_is_one_without_groups_or_pooling() -> None:
    context = random_layer(3, LENS, query_len=4)
    alone = attrs.evolve(context, queries=context.queries[:, ::2])
    for layer, kernel in ((alone, 5), (context, 1)):
        first = WindowMaxPoolScorer(4, kernel_size=kernel, group_first=True).score(layer)
        last = group_mean(WindowMaxPoolScorer(4, kernel_size=kernel).score(layer), 3)
        torch.testing.assert_close(first, last)


@pytest.mark.parametrize("method", [SnapKV, AdaKV, PyramidKV, CriticalKV])
def test_methods_offer_the_order(method: Any) -> None:
    assert method().scorer == WindowMaxPoolScorer(8, kernel_size=7)
    built = method(0.2, window_size=4, kernel_size=5, group_first=True)
    assert built.scorer == WindowMaxPoolScorer(4, kernel_size=5, group_first=True)
    bounded = method(retention_tokens=16, group_first=True, decoding=True)
    assert bounded.decoding.scorer == bounded.scorer


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
