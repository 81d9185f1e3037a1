"""Units of keys and blocks of units: on paper, and against slow loops."""

import attrs
import pytest
import torch

from kvpolicy import LayerContext
from kvpolicy.policies import BlockProductScorer, LastQueryProductScorer
from tests import reference
from tests.policies.views import view_of
from tests.reference.droppers import products
from tests.reference.selection import average_pool

from .support import check_tokens, layer_of, random_layer


def test_on_paper() -> None:
    """Units of two tokens, blocks of two units; the query is (1, 0), the mean of (3, 5), (-1, -5).

    Unit means along it are 1, -3, 2, 0 and 1/2: blocks have 3, 2 and 1/2.
    """
    keys = torch.tensor([2.0, 0.0, -4.0, -2.0, 1.0, 3.0, 4.0, -4.0, 0.5])[:, None] * torch.eye(2)[0]
    context = attrs.evolve(layer_of(keys), queries=torch.tensor([[[[3.0, 5.0], [-1.0, -5.0]]]]))
    saliency = BlockProductScorer(window_size=2, chunk_size=2, block_chunks=2).score(context)
    assert saliency.tolist() == [[[3.0] * 4 + [2.0] * 4 + [0.5]]]


def slow_scores(context: LayerContext, row: int, **sizes: int) -> list[float]:
    method = reference.SlimInfer((), context.query_len, **sizes)
    return method.scores(view_of(context, row))


@pytest.mark.parametrize(("unit", "blocks"), [(1, 1), (3, 2), (4, 3), (8, 8)])
def test_against_slow_loops_in_padded_rows(unit: int, blocks: int) -> None:
    context = random_layer(unit, (29, 13, 2), query_len=4)
    found = BlockProductScorer(window_size=4, chunk_size=unit, block_chunks=blocks).score(context)
    check_tokens(
        found,
        context,
        lambda row, head: slow_scores(context, row, unit_size=unit, block_units=blocks),
        rel=1e-5,
    )


def test_heads_may_hold_unlike_tokens() -> None:
    """In a later turn; a unit's mean is of what a head holds."""
    positions = torch.tensor([[[0, 3, 7, 9, 20, 21], [-1, 2, 3, 12, 20, 21], [1, 5, 6, 7, 20, 21]]])
    context = attrs.evolve(
        random_layer(0, (6,), query_len=2),
        positions=positions,
        new_valid=torch.ones(1, 2, dtype=torch.bool),
        seen_len=(22,),
    )
    saliency = BlockProductScorer(window_size=2, chunk_size=4, block_chunks=2).score(context)
    expected = slow_scores(context, 0, unit_size=4, block_units=2)
    for head in range(3):
        assert saliency[0, head, 4:].tolist() == pytest.approx(expected, rel=1e-5)
    assert saliency[0, 1, 1] == saliency[0, 0, 0] == saliency[0, 2, 3]  # of the first block
    assert saliency[0, 0, 3] == saliency[0, 1, 3] != saliency[0, 0, 0]


def test_the_last_tokens_own_product_can_be_left_out() -> None:
    lens = (9, 4)
    context = random_layer(3, lens, query_len=1)
    found = LastQueryProductScorer(kernel_size=5, own=False).score(context).mean(dim=1)
    for row, length in enumerate(lens):
        expected = reference.PromptDistill(()).scores(view_of(context, row))
        assert found[row, 9 - length :].tolist() == pytest.approx(expected, rel=1e-5)
    with_own = LastQueryProductScorer(kernel_size=5).score(context).mean(dim=1)
    assert torch.equal(with_own[0, :6], found[0, :6])
    assert not torch.isclose(with_own[0, 6:], found[0, 6:]).any()


def test_products_of_the_last_query_are_pooled_as_in_a_row_alone() -> None:
    context = random_layer(3, (9, 4), query_len=1)

    def expected(row: int, head: int) -> list[float]:
        alone = products(context.queries[row, head, 0], view_of(context, row), head)
        return average_pool(alone, 5)

    found = LastQueryProductScorer(kernel_size=5).score(context)
    check_tokens(found, context, expected, rel=1e-5)
