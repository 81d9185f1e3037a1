"""Chunks: on paper, against slow loops also where heads hold unlike tokens, and their method."""

import math
from collections import defaultdict

import pytest
import torch
from hypothesis import given

from kvpolicy import LayerContext, Scorer
from kvpolicy.policies import (
    AccumulatedAttentionScorer,
    ChunkKV,
    ChunkMeanScorer,
    KeyNormScorer,
    WindowMaxPoolScorer,
)
from kvpolicy.testing import layer_contexts

from .support import layer_of, random_layer

# Norms 1 to 8, so that saliencies are -1 to -8.
NORMS = torch.tensor([[2.0], [4.0], [1.0], [6.0], [5.0], [3.0], [8.0], [7.0]])


def test_chunks_on_paper() -> None:
    saliency = ChunkMeanScorer(KeyNormScorer(), chunk_size=3).score(layer_of(NORMS))
    expected = torch.tensor([*[-7 / 3] * 3, *[-14 / 3] * 3, *[-7.5] * 2])
    torch.testing.assert_close(saliency[0, 0], expected)


def slow(
    saliency: list[list[float]], context: LayerContext, row: int, tail: int, size: int
) -> dict[tuple[int, int], float]:
    """The number of each (head, slot) of a row, in plain Python, keyed by them."""
    found: dict[int, list[float]] = defaultdict(list)
    group = len(saliency) // context.kv_heads
    places = context.positions[row].tolist()
    for head, numbers in enumerate(saliency):
        for slot, number in enumerate(numbers[: len(numbers) - tail]):
            if (position := places[head // group][slot]) >= 0:
                found[position // size].append(number)
    means = {chunk: math.fsum(each) / len(each) for chunk, each in found.items()}
    return {
        (head, slot): means[position // size] if slot < context.key_len - tail else 0.0
        for head, held in enumerate(places)
        for slot, position in enumerate(held)
        if position >= 0
    }


@pytest.mark.parametrize(
    "scorer", [WindowMaxPoolScorer(3, kernel_size=1), KeyNormScorer()], ids=str
)
@pytest.mark.parametrize("size", [1, 5])
def test_against_slow_loops(scorer: Scorer, size: int) -> None:
    @given(context=layer_contexts(scorer.num_queries))
    def run(context: LayerContext) -> None:
        pooled = ChunkMeanScorer(scorer, chunk_size=size).score(context)
        base = scorer.score(context)
        for row in range(context.batch):
            expected = slow(base[row].tolist(), context, row, scorer.unscored_tail, size)
            for (head, slot), number in expected.items():
                assert float(pooled[row, head, slot]) == pytest.approx(number, rel=1e-4, abs=1e-5)

    run()


def test_whole_chunks_are_kept_the_same_for_all_heads() -> None:
    context = random_layer(5, (42,), query_len=2)
    policy = ChunkKV(retention_tokens=10, window_size=2, kernel_size=1, chunk_size=4)
    kept = policy.decide(context).kept[0]
    assert (kept == kept[0]).all()
    chosen = kept[0, :-2].tolist()
    assert kept[0, -2:].tolist() == [40, 41]
    assert [each % 4 for each in chosen] == [0, 1, 2, 3] * 2
    means = (
        WindowMaxPoolScorer(2, kernel_size=1)
        .score(context)[0, :, :40]
        .mean(dim=0)
        .view(10, 4)
        .mean(dim=1)
    )
    assert {each // 4 for each in chosen} == set(means.topk(2).indices.tolist())


def test_what_is_carried_is_the_scorers() -> None:
    context = random_layer(7, (11, 6), query_len=11)
    pooled, carried = ChunkMeanScorer(AccumulatedAttentionScorer(), chunk_size=3).update(context)
    torch.testing.assert_close(carried, AccumulatedAttentionScorer().update(context)[1])
    assert pooled.shape == (2, 3, 11)
