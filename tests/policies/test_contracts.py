"""The contract of every part, as a third party would run it."""

from typing import Any

import pytest

import kvpolicy
from kvpolicy import KVSelector, PropagationPolicy, Scorer
from kvpolicy.testing import check_propagation, check_scorer, check_selector
from tests.policies.written import made

CHECKS: dict[type, Any] = {
    Scorer: check_scorer,
    KVSelector: check_selector,
    PropagationPolicy: check_propagation,
}
REGISTERED: dict[str, Any] = {
    name: factory
    for kind in ("scorer", "selector", "propagation")
    for name, factory in kvpolicy.registered(kind).items()
}
WRITTEN = [
    *(f"{factory.__name__}()" for factory in REGISTERED.values()),
    # Scorers
    "WindowMaxPoolScorer(1, kernel_size=1)",
    "WindowMaxPoolScorer(3, kernel_size=5)",
    "WindowMaxPoolScorer(3, kernel_size=5, peak_first=True)",
    "WindowMaxPoolScorer(3, kernel_size=5, group_first=True)",
    "WindowMeanPoolScorer(3, kernel_size=5)",
    "WindowMeanPoolScorer(1, kernel_size=1)",
    "WindowAttentionScorer(3)",
    "ValueAwareScorer(WindowMaxPoolScorer(3, kernel_size=1))",
    "ValueAwareScorer(KeyNormScorer())",
    "SumScorer([WindowMaxPoolScorer(3), KeyDiffScorer()], weights=[1.0, 0.5])",
    "SumScorer([AccumulatedAttentionScorer(), WindowMaxPoolScorer(3)])",
    "0.5 * (AccumulatedAttentionScorer() + KeyNormScorer() * 2)",
    "MaxScorer([LastQueryScorer(), WindowMaxPoolScorer(4, kernel_size=3)])",
    "KeyAnomalyScorer(local_size=3, block_size=4)",
    "KeyAnomalyScorer(local_size=2, block_size=3)",
    "RandomScorer(seed=2**70)",
    "WeightedTailScorer(recent_rate=0.5, distance_weight=3.0)",
    "CURScorer(num_sinks=1, local_size=3)",
    "LagKVScorer(num_sinks=1, lag_size=3)",
    "LagKVScorer(num_sinks=0, lag_size=1)",
    "BlockProductScorer(window_size=2, chunk_size=3, block_chunks=2)",
    "BlockProductScorer(window_size=1, chunk_size=1, block_chunks=1)",
    "LastQueryProductScorer(own=False)",
    "ExpectedAttentionScorer(num_sinks=0, future_len=3)",
    "ExpectedAttentionScorer(epsilon=0.1)",
    "ExpectedAttentionScorer(num_sinks=2, future_len=70, by_value=False)",
    "ChunkMeanScorer(KeyNormScorer(), chunk_size=3)",
    "ChunkMeanScorer(AccumulatedAttentionScorer(), chunk_size=3)",
    "CAOTEScorer(LastQueryScorer())",
    "CAOTEScorer(AccumulatedAttentionScorer())",
    "CAOTEScorer(LastQueryScorer(), fast=True)",
    "CAOTEScorer(KeyNormScorer())",
    "ReplayedAttentionScorer(reach=1, sample_size=2)",
    "LeverageScorer(num_sinks=0, window_size=0, sketch_size=3)",
    "LeverageScorer(num_sinks=2, window_size=1, seed=2**70)",
    "ChunkAttentionScorer(num_sinks=0, window_size=0, chunk_size=5, kernel_size=1)",
    "ChunkAttentionScorer(num_sinks=3, window_size=2, chunk_size=16)",
    "Compactor(window_size=2, num_sinks=1, chunk_size=8).scorer",
    # Selectors
    "GQAGroupSelector(1.0, window_size=0)",
    "GQAGroupSelector(retention_tokens=9, window_size=3)",
    "GQAGroupSelector(0.1, window_size=2, protect=5)",
    "GQAGroupSelector(retention_tokens=4, window_size=0, protect=9)",
    "SinkAndRecentSelector(0.4, num_sinks=0)",
    "SinkAndRecentSelector(retention_tokens=11, num_sinks=5)",
    "SinkAndRecentSelector(0.2, num_sinks=2, protect=6)",
    "PyramidSelector(0.4, window_size=0, beta=2)",
    "PyramidSelector(retention_tokens=9, window_size=3, beta=7, protect=4)",
    "PyramidSelector(retention_tokens=14, window_size=3, floor_tokens=4)",
    "AdaptiveHeadSelector(0.3, window_size=0, floor=0.0)",
    "AdaptiveHeadSelector(retention_tokens=9, window_size=3, protect=4)",
    "GlobalThresholdSelector(0.3, window_size=0)",
    "GlobalThresholdSelector(retention_tokens=9, window_size=3, protect=4)",
    "GlobalThresholdSelector(0.4, window_size=2, protect=3, turns_apart=True)",
    "SameTokensSelector(0.3, window_size=0)",
    "SameTokensSelector(retention_tokens=9, protect=4, kernel_size=1)",
    "CriticalSelector(GQAGroupSelector(retention_tokens=6, window_size=0, protect=3))",
    "CriticalSelector(SinkAndRecentSelector(0.4))",
    "CriticalSelector(AdaptiveHeadSelector(0.3, window_size=2))",
    "FirstLayersWholeSelector(CriticalSelector(GQAGroupSelector(0.3, window_size=2)), "
    "whole_layers=2)",
    *(
        f"FirstTokensWholeSelector({inner}, whole_tokens={whole})"
        for whole in (2, 30)
        for inner in (
            "GQAGroupSelector(0.3, window_size=2)",
            "GQAGroupSelector(retention_tokens=6, window_size=0, protect=3)",
            "GQAGroupSelector(0.1, window_size=2, protect=9)",
            "SinkAndRecentSelector(0.4)",
            "AdaptiveHeadSelector(0.3, window_size=2)",
            "PyramidSelector(0.3, window_size=1)",
            "GlobalThresholdSelector(0.3, window_size=0)",
        )
    ),
    # Propagation
    "PyramidPropagation(recent_rate=0.1, decay_ratio=0.2, protect=2, min_context=0)",
    "TokenSelectivePropagation(tsp_rate=0.3, window_size=2)",
    "TokenSelectivePropagation(tsp_layer=0, tsp_tokens=7, window_size=1)",
    "TokenSelectivePropagation(tsp_rate=0.1, window_size=1, protect=6)",
    "StagedPropagation([TokenSelectivePropagation(tsp_layer=5, tsp_tokens=9, window_size=1, "
    "protect=2), TokenSelectivePropagation(tsp_layer=2, tsp_tokens=4, window_size=2, protect=7)])",
    "StagedPropagation([PyramidPropagation(recent_rate=0.1, decay_ratio=0.2, min_context=0)])",
    "AgreementPropagation(window_size=2)",
    "AgreementPropagation(0.5, agreement=0.0)",
    "BlockMassPropagation(tsp_layers=(2, 5), mass=0.5, chunk_size=4, protect=3, window_size=2)",
    "BlockMassPropagation(tsp_layers=(2,), mass=0.9, chunk_size=1, protect=0, window_size=1)",
    "BlockMassPropagation(tsp_layers=(0,), mass=0.3, chunk_size=7, protect=0, window_size=1)",
    "CrossLayerPropagation(tsp_rate=0.3, window_size=2)",
    "CrossLayerPropagation(tsp_tokens=7, window_size=1, protect=4, standardize=False)",
    "CrossLayerPropagation(tsp_rate=0.3, window_size=1, reduction='mean')",
    "CrossLayerPropagation(tsp_rate=0.3, window_size=1, voting_layers=1)",
]


@pytest.mark.parametrize("written", WRITTEN)
def test_parts(written: str) -> None:
    part = made(written)
    (check,) = (check for kind, check in CHECKS.items() if isinstance(part, kind))
    check(part)


@pytest.mark.parametrize(
    ("part", "smaller", "larger"),
    [
        ("GQAGroupSelector({}, window_size=2)", 0.3, 0.5),
        ("CriticalSelector(GQAGroupSelector({}, window_size=2), first_share=0.4)", 0.3, 0.5),
        ("PyramidSelector({}, window_size=2)", 0.1, 0.25),
        ("PyramidSelector({}, window_size=0, beta=3)", 0.5, 0.8),
        ("PyramidSelector(retention_tokens={}, window_size=1, protect=3)", 4, 5),
        ("PyramidSelector(retention_tokens={}, window_size=1, floor_tokens=4)", 7, 8),
        ("AdaptiveHeadSelector({}, window_size=2)", 0.1, 0.25),
        ("AdaptiveHeadSelector({}, window_size=0, floor=0.5)", 0.5, 0.8),
        ("AdaptiveHeadSelector(retention_tokens={}, window_size=1, floor=0.0, protect=3)", 9, 10),
        ("GlobalThresholdSelector({}, window_size=2)", 0.1, 0.25),
        ("GlobalThresholdSelector(retention_tokens={}, window_size=1, protect=3)", 9, 10),
        ("GlobalThresholdSelector({}, turns_apart=True)", 0.3, 0.34),
        ("SameTokensSelector({}, window_size=2)", 0.1, 0.25),
    ],
)
def test_a_larger_budget_only_adds(part: str, smaller: float, larger: float) -> None:
    check_selector(*(made(part.format(size)) for size in (smaller, larger)))


@pytest.mark.parametrize("name", list(kvpolicy.registered()))
def test_everything_registered_names_itself(name: str) -> None:
    factory: Any = kvpolicy.registered()[name]
    built = factory()
    assert factory.__doc__
    assert repr(built).startswith(factory.__name__)
    assert built == factory()
    assert hash(built) == hash(factory())
