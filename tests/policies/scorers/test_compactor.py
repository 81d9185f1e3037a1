"""Leverage of keys and attention within chunks: on paper, and against slow loops."""

import attrs
import pytest
import torch

from kvpolicy import LayerContext
from kvpolicy.policies import ChunkAttentionScorer, Compactor, LeverageScorer
from kvpolicy.rotary import PlainRotary
from tests.contexts import with_layer
from tests.policies.views import group_of, view_of
from tests.reference.query_agnostic import chunk_attentions, gaussian, leverages, standard, turned

from .support import THETA, check_tokens, in_a_later_turn, layer_of, random_layer, turning


def test_a_key_of_its_own_direction_has_the_most_leverage() -> None:
    """Keys along one axis but for the third, which nothing else replaces."""
    keys = torch.tensor([[9.0, 0], [-9.0, 0], [0, 2.0], [8.0, 0], [-8.0, 0], [5.0, 0]])
    context = with_layer(layer_of(keys), rotary=PlainRotary(2, 1e30))
    context = attrs.evolve(
        context, keys=context.layer.rotary.turned(context.keys, context.positions)
    )
    saliency = LeverageScorer(num_sinks=0, window_size=0).score(context)[0, 0]
    assert int(saliency.argmax()) == 2
    assert float(saliency.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(saliency.std(correction=0)) == pytest.approx(1.0)


PADDED = turning(48, (31, 17), 0)
ROWS = random_layer(4, (31, 17, 4), query_len=31)
LATER = in_a_later_turn(turning(1, (9, 9), 3))


@pytest.mark.parametrize(
    ("context", "sinks", "window", "columns"),
    [(PADDED, 0, 0, 48), (PADDED, 8, 4, 48), (PADDED, 3, 2, 5), (LATER, 2, 2, 48)],
)
def test_leverage_against_slow_loops(
    context: LayerContext, sinks: int, window: int, columns: int
) -> None:
    sketch = gaussian(7, context.layer_idx, 6, columns)

    def expected(row: int, head: int) -> list[float]:
        held = view_of(context, row).entries[head]
        inside = [j for j in range(len(held) - window) if held[j].position >= sinks]
        keys = [turned(held[j].key, -held[j].position, THETA) for j in inside]
        scores = dict(zip(inside, standard(leverages(keys, sketch)), strict=True))
        return [scores.get(j, 0.0) for j in range(len(held))]

    scorer = LeverageScorer(num_sinks=sinks, window_size=window, sketch_size=columns, seed=7)
    check_tokens(scorer.score(context), context, expected, rel=1e-3, abs=1e-4)


def test_each_layer_and_seed_has_its_own_projection() -> None:
    context = turning(0, (30,), 0)
    first = LeverageScorer(sketch_size=4).score(context)
    assert torch.equal(first, LeverageScorer(sketch_size=4).score(context))
    other = attrs.evolve(context, layer_idx=2)
    assert not torch.allclose(first, LeverageScorer(sketch_size=4).score(other))
    assert not torch.allclose(first, LeverageScorer(sketch_size=4, seed=1).score(context))


def test_attention_looks_both_ways_within_its_chunk() -> None:
    """Two chunks of two; the first token's query looks at the second alone, and so does the second.

    Of values of norms 1, 2, 1, 1 attentions 0, 2, 1, 1 become 0, 4, 1, 1: mean 3/2.
    """
    keys = torch.tensor([[0.0], [50.0], [0.0], [0.0]])
    values = torch.tensor([[1.0], [2.0], [1.0], [1.0]])
    context = attrs.evolve(layer_of(keys, values), queries=torch.ones(1, 1, 4, 1))
    saliency = ChunkAttentionScorer(num_sinks=0, window_size=0, chunk_size=2, kernel_size=1).score(
        context
    )[0, 0]
    deviation = ((1.5**2 + 2.5**2 + 0.5**2 + 0.5**2) / 4) ** 0.5
    expected = [each / deviation for each in (-1.5, 2.5, -0.5, -0.5)]
    assert saliency.tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("context", "sinks", "window", "chunk", "kernel"),
    [
        *((ROWS, 0, 0, 4, 1), (ROWS, 8, 4, 7, 3), (ROWS, 3, 2, 256, 3), (ROWS, 1, 1, 1, 5)),
        *((LATER, 2, 1, 3, 3), (LATER, 2, 1, 10, 3), (LATER, 2, 1, 100, 3)),
    ],
)
def test_attention_against_slow_loops(
    context: LayerContext, sinks: int, window: int, chunk: int, kernel: int
) -> None:
    def expected(row: int, head: int) -> list[float]:
        view = view_of(context, row)
        held, last = view.entries[head], max(len(view.new_positions) - window, 0)
        inside = [j for j in range(max(len(held) - window, 0)) if held[j].position >= sinks]
        found = chunk_attentions(
            [rows[:last] for rows in group_of(view, head)],
            view.new_positions[:last],
            [held[j] for j in inside],
            num_sinks=sinks,
            chunk_size=chunk,
            kernel_size=kernel,
        )
        scores = dict(zip(inside, found, strict=True))
        return [scores.get(j, 0.0) for j in range(len(held))]

    scorer = ChunkAttentionScorer(
        num_sinks=sinks, window_size=window, chunk_size=chunk, kernel_size=kernel
    )
    check_tokens(scorer.score(context), context, expected, rel=1e-3, abs=1e-4)


def test_the_weight_of_the_leverage() -> None:
    assert Compactor(0.25).scorer.weights == (0.75, 1.0)  # type: ignore[union-attr]
    assert Compactor(retention_tokens=9).scorer.weights == (0.35, 1.0)  # type: ignore[union-attr]
    assert Compactor(0.25, blending=2).scorer.weights == (2.0, 1.0)  # type: ignore[union-attr]
    assert Compactor(protect=20).selector.protected_first == 20
    assert Compactor(protect=2).selector.protected_first == 8
