"""The contract of every registered part, as a third party would run it."""

from typing import Any

import pytest

import kvpolicy
from kvpolicy.policies import (
    AccumulatedAttentionScorer,
    AdaptiveHeadSelector,
    GlobalThresholdSelector,
    GQAGroupSelector,
    KeyAnomalyScorer,
    KeyDiffScorer,
    KeyNormScorer,
    LastQueryScorer,
    MaxScorer,
    PyramidPropagation,
    PyramidSelector,
    RandomScorer,
    SameTokensSelector,
    SinkAndRecentSelector,
    StagedPropagation,
    SumScorer,
    TokenSelectivePropagation,
    ValueAwareScorer,
    WeightedTailScorer,
    WindowMaxPoolScorer,
)
from kvpolicy.testing import check_propagation, check_scorer, check_selector

CHECKS: dict[str, Any] = {
    "scorer": check_scorer,
    "selector": check_selector,
    "propagation": check_propagation,
}
REGISTERED = [
    (kind, name, factory) for kind in CHECKS for name, factory in kvpolicy.registered(kind).items()
]


@pytest.mark.parametrize(
    ("kind", "factory"),
    [(kind, factory) for kind, _, factory in REGISTERED],
    ids=[name for _, name, _ in REGISTERED],
)
def test_registered_parts(kind: str, factory: Any) -> None:
    CHECKS[kind](factory())


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("scorer", WindowMaxPoolScorer(1, kernel_size=1)),
        ("scorer", WindowMaxPoolScorer(3, kernel_size=5)),
        ("scorer", WindowMaxPoolScorer(3, kernel_size=5, peak_first=True)),
        ("scorer", ValueAwareScorer(WindowMaxPoolScorer(3, kernel_size=1))),
        ("scorer", ValueAwareScorer(KeyNormScorer())),
        ("scorer", SumScorer([WindowMaxPoolScorer(3), KeyDiffScorer()], weights=[1.0, 0.5])),
        ("scorer", MaxScorer([LastQueryScorer(), WindowMaxPoolScorer(4, kernel_size=3)])),
        ("scorer", SumScorer([AccumulatedAttentionScorer(), WindowMaxPoolScorer(3)])),
        ("scorer", KeyAnomalyScorer(local_size=3, block_size=4)),
        ("scorer", RandomScorer(seed=2**70)),
        ("selector", GQAGroupSelector(0.3, window_size=2)),
        ("selector", GQAGroupSelector(1.0, window_size=0)),
        ("selector", GQAGroupSelector(retention_tokens=9, window_size=3)),
        ("selector", SinkAndRecentSelector(0.4, num_sinks=0)),
        ("selector", SinkAndRecentSelector(retention_tokens=11, num_sinks=5)),
        ("selector", GQAGroupSelector(0.1, window_size=2, protect=5)),
        ("selector", GQAGroupSelector(retention_tokens=4, window_size=0, protect=9)),
        ("selector", SinkAndRecentSelector(0.2, num_sinks=2, protect=6)),
        ("selector", PyramidSelector(0.4, window_size=0, beta=2)),
        ("selector", PyramidSelector(retention_tokens=9, window_size=3, beta=7, protect=4)),
        ("selector", PyramidSelector(retention_tokens=14, window_size=3, floor_tokens=4)),
        ("selector", AdaptiveHeadSelector(0.3, window_size=0, floor=0.0)),
        ("selector", AdaptiveHeadSelector(retention_tokens=9, window_size=3, protect=4)),
        ("selector", GlobalThresholdSelector(0.3, window_size=0)),
        ("selector", GlobalThresholdSelector(retention_tokens=9, window_size=3, protect=4)),
        ("selector", GlobalThresholdSelector(0.4, window_size=2, protect=3, turns_apart=True)),
        ("selector", SameTokensSelector(0.3, window_size=0)),
        ("selector", SameTokensSelector(retention_tokens=9, protect=4, kernel_size=1)),
        ("scorer", WeightedTailScorer(recent_rate=0.5, distance_weight=3.0)),
        (
            "propagation",
            PyramidPropagation(recent_rate=0.1, decay_ratio=0.2, protect=2, min_context=0),
        ),
        ("propagation", TokenSelectivePropagation(tsp_rate=0.3, window_size=2)),
        ("propagation", TokenSelectivePropagation(tsp_layer=0, tsp_tokens=7, window_size=1)),
        ("propagation", TokenSelectivePropagation(tsp_rate=0.1, window_size=1, protect=6)),
        (
            "propagation",
            StagedPropagation(
                [
                    TokenSelectivePropagation(tsp_layer=5, tsp_tokens=9, window_size=1, protect=2),
                    TokenSelectivePropagation(tsp_layer=2, tsp_tokens=4, window_size=2, protect=7),
                ]
            ),
        ),
        (
            "propagation",
            StagedPropagation(
                [PyramidPropagation(recent_rate=0.1, decay_ratio=0.2, min_context=0)]
            ),
        ),
    ],
    ids=str,
)
def test_other_parameters(kind: str, part: Any) -> None:
    CHECKS[kind](part)


@pytest.mark.parametrize(
    ("part", "larger"),
    [
        (PyramidSelector(0.1, window_size=2), PyramidSelector(0.25, window_size=2)),
        (PyramidSelector(0.5, window_size=0, beta=3), PyramidSelector(0.8, window_size=0, beta=3)),
        (
            PyramidSelector(retention_tokens=4, window_size=1, protect=3),
            PyramidSelector(retention_tokens=5, window_size=1, protect=3),
        ),
        (
            PyramidSelector(retention_tokens=7, window_size=1, floor_tokens=4),
            PyramidSelector(retention_tokens=8, window_size=1, floor_tokens=4),
        ),
        (AdaptiveHeadSelector(0.1, window_size=2), AdaptiveHeadSelector(0.25, window_size=2)),
        (
            AdaptiveHeadSelector(0.5, window_size=0, floor=0.5),
            AdaptiveHeadSelector(0.8, window_size=0, floor=0.5),
        ),
        (
            AdaptiveHeadSelector(retention_tokens=9, window_size=1, floor=0.0, protect=3),
            AdaptiveHeadSelector(retention_tokens=10, window_size=1, floor=0.0, protect=3),
        ),
        (GlobalThresholdSelector(0.1, window_size=2), GlobalThresholdSelector(0.25, window_size=2)),
        (
            GlobalThresholdSelector(retention_tokens=9, window_size=1, protect=3),
            GlobalThresholdSelector(retention_tokens=10, window_size=1, protect=3),
        ),
        (
            GlobalThresholdSelector(0.3, turns_apart=True),
            GlobalThresholdSelector(0.34, turns_apart=True),
        ),
        (SameTokensSelector(0.1, window_size=2), SameTokensSelector(0.25, window_size=2)),
    ],
    ids=str,
)
def test_a_larger_budget_only_adds(part: Any, larger: Any) -> None:
    check_selector(part, larger)


@pytest.mark.parametrize("name", list(kvpolicy.registered()))
def test_everything_registered_names_itself(name: str) -> None:
    factory: Any = kvpolicy.registered()[name]
    built = factory()
    assert factory.__doc__
    assert repr(built).startswith(factory.__name__)
    assert built == factory()
    assert hash(built) == hash(factory())
