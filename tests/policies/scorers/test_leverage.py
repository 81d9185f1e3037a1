"""Shares of norms: on paper, against slow loops, and their method."""

import math

import pytest
import torch

from kvpolicy.policies import CurDKV, CURScorer

from .support import check_tokens, held_by, layer_of, random_layer

# Squared norms 9, 16, 25 | 4, 4 of keys and 1, 1, 4 | 3, 1 of values.
KEYS = torch.tensor([[3.0, 0.0], [0.0, 4.0], [3.0, 4.0], [2.0, 0.0], [0.0, 2.0]])
VALUES = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [3**0.5, 0.0], [0.0, 1.0]])


def test_two_stretches_on_paper() -> None:
    """The products of shares are 9, 16, 100 of 300, then 3 and 1 of 8; 1100 of 1200 in all."""
    saliency = CURScorer(num_sinks=0, local_size=3).score(layer_of(KEYS, VALUES))
    expected = torch.tensor([36.0, 64.0, 400.0, 450.0, 150.0]) / 1100
    torch.testing.assert_close(saliency[0, 0], expected)
    sunk = CURScorer(num_sinks=1, local_size=3).score(layer_of(KEYS, VALUES))
    torch.testing.assert_close(sunk[0, 0], torch.cat([torch.ones(1), expected[1:]]))
    policy = CurDKV(retention_tokens=3, window_size=0, num_sinks=1, local_size=3)
    assert policy.decide(layer_of(KEYS, VALUES)).kept.tolist() == [[[0, 2, 3]]]


def test_nothing_makes_up_nothing() -> None:
    saliency = CURScorer(num_sinks=1, local_size=2).score(layer_of(torch.zeros(5, 3)))
    assert saliency.tolist() == [[[1.0, 0.0, 0.0, 0.0, 0.0]]]


def slow(keys: list[list[float]], values: list[list[float]], sinks: int, size: int) -> list[float]:
    """The saliency of one head of one row, in plain Python."""
    products = []
    for j in range(len(keys)):
        stretch = range(j - j % size, min(j - j % size + size, len(keys)))
        product = 1.0
        for states in (keys, values):
            norms = {i: math.fsum(x * x for x in states[i]) for i in stretch}
            product *= norms[j] / math.fsum(norms.values())
        products.append(product)
    total = math.fsum(products)
    return [1.0 if j < sinks else product / total for j, product in enumerate(products)]


@pytest.mark.parametrize(("sinks", "size"), [(0, 1), (0, 4), (4, 16), (2, 50)])
def test_against_slow_loops_in_padded_rows(sinks: int, size: int) -> None:
    context = random_layer(size, (23, 9, 2, 29))

    def expected(row: int, head: int) -> list[float]:
        keys, values = held_by(context, row, head)
        return slow(keys.tolist(), values.tolist(), sinks, size)

    found = CURScorer(num_sinks=sinks, local_size=size).score(context)
    check_tokens(found, context, expected, rel=1e-5)
