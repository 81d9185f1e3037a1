"""The methods on tensors small enough for paper, their parameters and the paper's figures."""

from typing import Any

import attrs
import pytest
import torch

from kvpolicy import CachePolicy, LayerContext
from kvpolicy.policies import (
    FastKV,
    FullContext,
    GQAGroupSelector,
    SinkAndRecentSelector,
    SnapKV,
    StreamingLLM,
    TokenSelectivePropagation,
    WindowMaxPoolScorer,
)


def layer(weights: list[list[float]], *, layer_idx: int = 0, num_layers: int = 2) -> LayerContext:
    """A layer of one KV head in which query head h's last query attends with `weights[h]`.

    Queries are unit vectors that pick the logarithm of the wanted weight out of each key.
    """
    heads, key_len = len(weights), len(weights[0])
    keys = torch.tensor(weights).log().T[None, None]  # head_dim = heads
    return LayerContext(
        layer_idx=layer_idx,
        num_layers=num_layers,
        queries=torch.eye(heads)[None, :, None].expand(1, heads, 1, heads),
        keys=keys,
        values=torch.zeros_like(keys),
        positions=torch.arange(key_len)[None, None],
        new_valid=torch.ones(1, key_len, dtype=torch.bool),
        seen_len=(key_len,),
        scaling=1.0,
    )


# Two query heads over eight keys; both rows sum to 1.
WEIGHTS = [
    [0.30, 0.01, 0.01, 0.02, 0.20, 0.02, 0.04, 0.40],
    [0.01, 0.01, 0.29, 0.02, 0.03, 0.02, 0.02, 0.60],
]


def test_window_saliency_without_pooling_is_the_attention() -> None:
    saliency = WindowMaxPoolScorer(window_size=1, kernel_size=1).score(layer(WEIGHTS))
    expected = torch.tensor([[*row[:-1], 0.0] for row in WEIGHTS])
    torch.testing.assert_close(saliency[0], expected)


def test_pooling_takes_neighbours_along_but_not_from_the_window() -> None:
    saliency = WindowMaxPoolScorer(window_size=1, kernel_size=3).score(layer(WEIGHTS))
    expected = [[0.30, 0.30, 0.02, 0.20, 0.20, 0.20, 0.04, 0.0]]
    torch.testing.assert_close(saliency[0, :1], torch.tensor(expected))


def test_the_group_keeps_what_its_heads_like_on_average() -> None:
    context = layer(WEIGHTS)
    saliency = WindowMaxPoolScorer(1, 1).score(context)
    for count, expected in [(2, [0, 7]), (3, [0, 2, 7]), (4, [0, 2, 4, 7])]:
        selector = GQAGroupSelector(retention_tokens=count, window_size=1)
        assert selector.select(saliency, context).tolist() == [[expected]]


def test_snapkv_at_half_the_context() -> None:
    decision = SnapKV(0.5, window_size=1, kernel_size=1).decide(layer(WEIGHTS))
    assert decision.kept.tolist() == [[[0, 2, 4, 7]]]
    assert decision.passed_on is None


def test_streaming_llm_keeps_both_ends() -> None:
    decision = StreamingLLM(0.5, num_sinks=1).decide(layer(WEIGHTS))
    assert decision.kept.tolist() == [[[0, 5, 6, 7]]]
    decision = StreamingLLM(0.1, num_sinks=4).decide(layer(WEIGHTS))
    assert decision.kept.tolist() == [[[0, 1, 2, 3]]]


def test_fastkv_passes_on_at_its_layer_only() -> None:
    policy = FastKV(0, tsp_rate=0.5, retention_rate=0.25, window_size=1, kernel_size=1)
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
    policy = FastKV(0, tsp_rate=0.1, retention_rate=0.1, window_size=1, kernel_size=1)
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


def test_compute_rate_of_a_number_of_tokens_needs_the_context() -> None:
    policy = FastKV(0, tsp_tokens=100, retention_tokens=50)
    assert policy.prefill_compute_rate(2, context_len=1000) == pytest.approx(0.55)
    assert policy.prefill_compute_rate(2, context_len=40) == 1.0
    with pytest.raises(ValueError, match="context_len must be given where tsp_tokens is"):
        policy.prefill_compute_rate(2)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: SnapKV(0.0), ValueError, r"retention_rate must be in \(0, 1\], got 0.0"),
        (lambda: SnapKV(1.1), ValueError, r"retention_rate must be in \(0, 1\], got 1.1"),
        (lambda: FastKV(tsp_rate=-1), ValueError, r"tsp_rate must be in \(0, 1\], got -1"),
        (
            lambda: SnapKV(0.2, retention_tokens=10),
            ValueError,
            "exactly one of retention_rate and retention_tokens must be given, got "
            "retention_rate=0.2 and retention_tokens=10",
        ),
        (lambda: FastKV(tsp_rate=0.2, tsp_tokens=9), ValueError, "exactly one of tsp_rate"),
        (lambda: StreamingLLM(None), ValueError, "exactly one of retention_rate"),
        (
            lambda: FastKV(retention_rate=0.3),
            ValueError,
            "retention_rate must not exceed tsp_rate, .* retention_rate=0.3 and tsp_rate=0.2",
        ),
        (
            lambda: FastKV(tsp_tokens=5, retention_tokens=6),
            ValueError,
            "retention_tokens must not exceed tsp_tokens, .* got retention_tokens=6 and",
        ),
        (lambda: SnapKV(kernel_size=6), ValueError, "kernel_size must be odd, .* got 6; use 5 or"),
        (lambda: FastKV(kernel_size=0), ValueError, "kernel_size must be at least 1, got 0"),
        (lambda: SnapKV(window_size=0), ValueError, "window_size must be at least 1, got 0"),
        (lambda: SnapKV(window_size=8.0), TypeError, "window_size must be an int, got 8.0"),
        (
            lambda: TokenSelectivePropagation(window_size=0),
            ValueError,
            "window_size must be at least 1, got 0",
        ),
        (lambda: FastKV(tsp_layer=-1), ValueError, "tsp_layer must be at least 0, got -1"),
        (lambda: StreamingLLM(num_sinks=-1), ValueError, "num_sinks must be at least 0, got -1"),
        (lambda: StreamingLLM("all"), TypeError, "retention_rate must be a number"),
    ],
)
def test_bad_parameters(build: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()


def test_a_number_of_tokens_takes_the_place_of_a_default_rate() -> None:
    policy = FastKV(tsp_tokens=300, retention_tokens=100)
    assert policy.selector == GQAGroupSelector(None, 8, 100)
    assert policy.propagation == TokenSelectivePropagation(None, None, 8, 300)
    assert "retention_rate=None" in repr(policy)
    assert StreamingLLM(retention_tokens=7).selector == SinkAndRecentSelector(None, 4, 7)


@pytest.mark.parametrize("policy", [FullContext(), StreamingLLM(), SnapKV(), FastKV()])
def test_a_method_equals_its_parts_put_together_by_hand(policy: CachePolicy) -> None:
    by_hand = CachePolicy(policy.scorer, policy.selector, policy.propagation)
    context = layer(WEIGHTS)
    assert torch.equal(policy.decide(context).kept, by_hand.decide(context).kept)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        policy.scorer = None  # type: ignore[misc]
