"""The methods on tensors small enough for paper, their parameters and the paper's figures."""

import math
from typing import Any

import attrs
import pytest
import torch

from kvpolicy import CachePolicy, LayerContext, Scorer
from kvpolicy.policies import (
    TOVA,
    AccumulatedAttentionScorer,
    AdaKV,
    AdaptiveHeadSelector,
    FastKV,
    FullContext,
    GQAGroupSelector,
    KeyDiffScorer,
    KeyNormScorer,
    LastQueryScorer,
    MaxScorer,
    PyramidInfer,
    PyramidKV,
    PyramidSelector,
    RandomScorer,
    SinkAndRecentSelector,
    SnapKV,
    SpireKV,
    StreamingLLM,
    SumScorer,
    TokenSelectivePropagation,
    ValueAwareScorer,
    WindowMaxPoolScorer,
)
from tests.contexts import layer_context
from tests.policies.views import passed_by
from tests.processes import python


def layer(weights: list[list[float]], **changes: Any) -> LayerContext:
    """A layer of one KV head in which query head h's last query attends with `weights[h]`.

    Queries are unit vectors that pick the logarithm of the wanted weight out of each key.
    """
    heads = len(weights)
    keys = torch.tensor(weights).log().T[None, None]  # head_dim = heads
    queries = torch.eye(heads)[None, :, None].expand(1, heads, 1, heads)
    return layer_context(keys, **{"queries": queries, "values": torch.zeros_like(keys), **changes})


# Two query heads over eight keys; both rows sum to 1.
WEIGHTS = [
    [0.30, 0.01, 0.01, 0.02, 0.20, 0.02, 0.04, 0.40],
    [0.01, 0.01, 0.29, 0.02, 0.03, 0.02, 0.02, 0.60],
]


# One peak at token 3, whose saliency six tokens share.
PEAK = [[0.02, 0.02, 0.02, 0.4, 0.02, 0.02, 0.02, 0.02, 0.46]] * 2


@pytest.mark.parametrize(
    ("scorer", "expected"),
    [
        (WindowMaxPoolScorer(1, kernel_size=1), [[*row[:-1], 0.0] for row in WEIGHTS]),
        # Neighbours are taken along, but not from the window.
        (
            WindowMaxPoolScorer(1, kernel_size=3),
            [
                [0.30, 0.30, 0.02, 0.20, 0.20, 0.20, 0.04, 0.0],
                [0.01, 0.29, 0.29, 0.29, 0.03, 0.03, 0.02, 0.0],
            ],
        ),
        (LastQueryScorer(), WEIGHTS),
    ],
    ids=str,
)
def test_saliency_on_paper(scorer: Scorer, expected: list[list[float]]) -> None:
    torch.testing.assert_close(scorer.score(layer(WEIGHTS))[0], torch.tensor(expected))


@pytest.mark.parametrize(
    ("policy", "weights", "expected"),
    [
        (SnapKV(0.5, window_size=1, kernel_size=1), WEIGHTS, [0, 2, 4, 7]),
        # What the heads of the group like on average.
        (SnapKV(retention_tokens=2, window_size=1, kernel_size=1), WEIGHTS, [0, 7]),
        (SnapKV(retention_tokens=3, window_size=1, kernel_size=1), WEIGHTS, [0, 2, 7]),
        # Of equal neighbours the earliest, or the peak and those after it.
        (SnapKV(retention_tokens=4, window_size=1), PEAK, [0, 1, 2, 8]),
        (SpireKV(retention_tokens=4, window_size=1, tsp_rate=1.0, beta=1), PEAK, [3, 4, 5, 8]),
        (StreamingLLM(0.5, num_sinks=1), WEIGHTS, [0, 5, 6, 7]),
        (StreamingLLM(0.1, num_sinks=4), WEIGHTS, [0, 1, 2, 3]),
        (TOVA(retention_tokens=3), WEIGHTS, [0, 2, 7]),
    ],
    ids=str,
)
def test_what_is_kept_on_paper(
    policy: CachePolicy, weights: list[list[float]], expected: list[int]
) -> None:
    decision = policy.decide(layer(weights))
    assert decision.kept.tolist() == [[expected]]
    assert decision.passed_on is None


def test_fastkv_passes_on_at_its_layer_only() -> None:
    policy = FastKV(tsp_layer=0, tsp_rate=0.5, retention_rate=0.25, window_size=1, kernel_size=1)
    decision = policy.decide(layer(WEIGHTS))
    assert decision.kept.tolist() == [[[0, 7]]]
    assert decision.passed_on is not None
    assert decision.passed_on.tolist() == [[0, 2, 4, 7]]
    assert policy.decide(layer(WEIGHTS, layer_idx=1)).passed_on is None


def test_a_second_turn_takes_rates_of_all_that_was_seen() -> None:
    """Of 20 tokens seen, 5 are held and 3 are new."""
    positions = torch.tensor([[[2, 5, 9, 11, 16, 17, 18, 19]]])
    context = attrs.evolve(
        layer(WEIGHTS),
        positions=positions,
        new_valid=torch.ones(1, 3, dtype=torch.bool),
        seen_len=(20,),
    )
    policy = FastKV(tsp_layer=0, tsp_rate=0.1, retention_rate=0.1, window_size=1, kernel_size=1)
    decision = policy.decide(context)
    assert decision.kept.tolist() == [[[0, 7]]]  # int(20 * 0.1), among held and new
    assert decision.passed_on is not None
    assert decision.passed_on.tolist() == [[1, 2]]  # int(20 * 0.1), among the new: slots 5 to 7


def test_full_context_keeps_all_but_padding() -> None:
    context = attrs.evolve(
        layer(WEIGHTS),
        positions=torch.tensor([[[-1, -1, 0, 1, 2, 3, 4, 5]]]),
        new_valid=torch.tensor([[False] * 2 + [True] * 6]),
        seen_len=(6,),
    )
    assert FullContext().decide(context).kept.tolist() == [[[2, 3, 4, 5, 6, 7]]]


@pytest.mark.parametrize(("num_layers", "tsp_layer"), [(32, 15), (36, 17), (40, 19), (6, 2)])
def test_the_papers_layers_and_compute_rate(num_layers: int, tsp_layer: int) -> None:
    propagation = TokenSelectivePropagation()
    assert propagation.acting_layers(num_layers) == {tsp_layer}
    assert FastKV().prefill_compute_rate(num_layers) == pytest.approx(0.6)
    assert SnapKV().prefill_compute_rate(num_layers) == 1.0


@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-1, ValueError), (2.5, TypeError), (True, TypeError)]
)
@pytest.mark.parametrize("policy", [SnapKV(), FastKV(), AdaKV(), PyramidKV(), FullContext()])
def test_numbers_of_layers_and_tokens_that_are_none(
    policy: CachePolicy, value: Any, error: type[Exception]
) -> None:
    for rates in (policy.prefill_compute_rate, policy.selector.kept_rates):
        with pytest.raises(error, match="num_layers must be"):
            rates(value)
    with pytest.raises(error, match="num_layers must be"):
        policy.check_model(value)
    with pytest.raises(error, match="context_len must be"):
        policy.prefill_compute_rate(4, value)
    with pytest.raises(error, match="context_len must be"):
        SnapKV(retention_tokens=9).selector.kept_rates(4, value)


@pytest.mark.parametrize("name", ["window_size", "protect"])
def test_counts_beyond_what_a_tensor_holds(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at most 9223372036854775807, got 1"):
        GQAGroupSelector(**{name: 10**30})
    context = layer(WEIGHTS)
    for part in (
        GQAGroupSelector(0.2, **{name: 2**63 - 1}),
        AdaptiveHeadSelector(0.2, **{name: 2**63 - 1}),
    ):
        kept = part.select(context.keys.sum(-1), context)
        assert kept.tolist() == [[list(range(context.key_len))]]


def test_compute_rate_of_a_number_of_tokens_needs_the_context() -> None:
    policy = FastKV(tsp_layer=0, tsp_tokens=100, retention_tokens=50)
    assert policy.prefill_compute_rate(2, context_len=1000) == pytest.approx(0.55)
    assert policy.prefill_compute_rate(2, context_len=40) == 1.0
    with pytest.raises(ValueError, match="context_len must be given if tsp_tokens is"):
        policy.prefill_compute_rate(2)


def test_a_number_of_tokens_takes_the_place_of_a_default_rate() -> None:
    policy = FastKV(tsp_tokens=300, retention_tokens=100)
    assert policy.selector == GQAGroupSelector(None, window_size=8, retention_tokens=100)
    assert policy.propagation == TokenSelectivePropagation(
        tsp_layer=None, tsp_rate=None, window_size=8, tsp_tokens=300
    )
    assert "retention_rate=None" in repr(policy.selector)
    assert str(policy) == "FastKV(tsp_tokens=300, retention_tokens=100)"
    for method, selector in (
        (StreamingLLM, SinkAndRecentSelector(None, num_sinks=4, retention_tokens=64)),
        (PyramidKV, PyramidSelector(None, window_size=8, retention_tokens=64, beta=20)),
        (AdaKV, AdaptiveHeadSelector(None, window_size=8, retention_tokens=64, floor=0.2)),
    ):
        assert method(retention_tokens=64).selector == selector


@pytest.mark.parametrize("policy", [FullContext(), StreamingLLM(), SnapKV(), FastKV()])
def test_a_method_equals_its_parts_put_together_by_hand(policy: CachePolicy) -> None:
    by_hand = CachePolicy(policy.scorer, policy.selector, policy.propagation)
    context = layer(WEIGHTS)
    assert torch.equal(policy.decide(context).kept, by_hand.decide(context).kept)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        policy.scorer = None  # type: ignore[misc]


def test_key_norm_and_key_diff_on_paper() -> None:
    keys = torch.tensor([[[[3.0, 4.0], [1.0, 0.0], [0.0, -2.0]]]])
    context = attrs.evolve(
        layer([[1.0, 1.0, 1.0]]), keys=keys, values=keys, queries=torch.ones(1, 1, 1, 2)
    )
    assert KeyNormScorer().score(context).tolist() == [[[-5.0, -1.0, -2.0]]]
    # Directions (.6, .8), (1, 0), (0, -1); their mean points along (1.6, -.2).
    length = math.hypot(1.6, 0.2)
    expected = [[[-(0.6 * 1.6 - 0.8 * 0.2) / length, -1.6 / length, -0.2 / length]]]
    torch.testing.assert_close(KeyDiffScorer().score(context), torch.tensor(expected))


def test_random_numbers_are_spread_and_independent() -> None:
    context = attrs.evolve(
        layer(WEIGHTS),
        keys=torch.zeros(1, 2, 5000, 2),
        values=torch.zeros(1, 2, 5000, 2),
        positions=torch.arange(5000).expand(1, 2, 5000),
        new_valid=torch.ones(1, 5000, dtype=torch.bool),
        seen_len=(5000,),
    )
    numbers = RandomScorer(seed=0).score(context)[0]
    assert 0 <= numbers.min() < 0.01
    assert 0.99 < numbers.max() < 1
    counts = torch.histc(numbers, bins=10, min=0, max=1)
    assert (counts - 1000).abs().max() < 120  # four standard deviations of a fair draw
    others = [
        RandomScorer(seed=1).score(context)[0, 0],
        RandomScorer(seed=0).score(attrs.evolve(context, layer_idx=1))[0, 0],
        numbers[1],
    ]
    for other in others:
        assert abs(torch.corrcoef(torch.stack([numbers[0], other]))[0, 1]) < 0.06


MEMORY_OF_A_LONG_CONTEXT = """
import resource
import torch
from kvpolicy import AttentionSettings, LayerContext
from kvpolicy.policies import AccumulatedAttentionScorer

def context(length):
    return LayerContext(
        layer_idx=0,
        num_layers=1,
        queries=torch.randn(1, 2, length, 8, dtype=torch.bfloat16),
        keys=torch.randn(1, 1, length, 8, dtype=torch.bfloat16),
        values=torch.zeros(1, 1, length, 8, dtype=torch.bfloat16),
        positions=torch.arange(length).expand(1, 1, length),
        new_valid=torch.ones(1, length, dtype=torch.bool),
        seen_len=(length,),
        attention=AttentionSettings(0.4),
    )

torch.set_num_threads(1)
AccumulatedAttentionScorer().score(context(64))
long = context(32768)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
sums = AccumulatedAttentionScorer().score(long)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, sums.sum().item())
"""


def test_h2o_at_32768_tokens_takes_less_than_64_megabytes() -> None:
    extra, total = map(float, python("-c", MEMORY_OF_A_LONG_CONTEXT).stdout.split())
    assert total == pytest.approx(2 * 32768, rel=1e-3)  # every query of both heads gives 1 in all
    assert extra < 64  # the whole matrix of two heads would be 8,192


def test_combined_scorers_on_paper() -> None:
    context = attrs.evolve(
        layer(WEIGHTS), values=torch.arange(16.0).view(1, 1, 8, 2) * torch.tensor([3.0, 0.0])
    )
    first, keys = LastQueryScorer(), KeyNormScorer()
    attention, norms = first.score(context), keys.score(context)
    valued = ValueAwareScorer(first).score(context)
    torch.testing.assert_close(valued, attention * torch.arange(0, 48, 6.0))
    both = SumScorer([first, keys], weights=[1.0, 2.0]).score(context)
    torch.testing.assert_close(both, attention + 2 * norms)
    highest = MaxScorer([first, RandomScorer()]).score(context)
    torch.testing.assert_close(highest, attention.maximum(RandomScorer().score(context)))


def test_a_part_of_a_sum_sees_no_more_queries_than_alone() -> None:
    context = attrs.evolve(layer(WEIGHTS), queries=torch.randn(1, 2, 5, 2))
    alone = attrs.evolve(context, queries=context.queries[:, :, -1:])
    both = SumScorer([LastQueryScorer(), AccumulatedAttentionScorer()]).score(context)
    expected = LastQueryScorer().score(alone) + AccumulatedAttentionScorer().score(context)
    torch.testing.assert_close(both, expected)


@pytest.mark.parametrize(("num_layers", "decay_ratio"), [(32, 0.7), (36, 0.75)])
def test_pyramid_infer_computes_the_papers_share(num_layers: int, decay_ratio: float) -> None:
    rate = PyramidInfer(decay_ratio=decay_ratio).prefill_compute_rate(num_layers)
    assert rate == pytest.approx(0.60, abs=0.006)


def test_pyramid_infer_on_paper() -> None:
    """Eight tokens, a tail of 1 + int(8 * 0.125) = 2, so six before it; r is 0.55 at layer 1 of 2.

    int(6 * 0.55) = 3 of them go on: the sink, and the two that weigh most on average.
    """
    context = layer(WEIGHTS, layer_idx=1)
    context = attrs.evolve(context, queries=context.queries.expand(1, 2, 2, 2))
    policy = PyramidInfer(
        recent_rate=0.125, decay_ratio=0.1, distance_weight=1.0, num_sinks=1, min_context=2
    )
    assert policy.scorer is not None
    weights = policy.scorer.score(context).mean(dim=1)[0]
    # The first of the two tail queries does not see the last token, the second sees all.
    first = torch.tensor([row[:7] for row in WEIGHTS])
    first = first / first.sum(dim=1, keepdim=True)
    expected = (first + torch.tensor(WEIGHTS)[:, :7]).mean(dim=0) / 2
    torch.testing.assert_close(weights[:7], expected)
    saliency = policy.scorer.score(context)
    assert passed_by(policy.propagation, saliency, context) == [[0, 2, 4, 6, 7]]
    # Two would not be more than min_context: nothing is dropped.
    reluctant = PyramidInfer(recent_rate=0.125, decay_ratio=0.1, num_sinks=1, min_context=3)
    assert passed_by(reluctant.propagation, saliency, context) is None
