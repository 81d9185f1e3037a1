"""Policies and parts print as one writes them."""

import pytest

from kvpolicy import CachePolicy
from kvpolicy.description import describe, from_description
from kvpolicy.policies import (
    FastKV,
    GemFilter,
    GQAGroupSelector,
    KeyNormScorer,
    PassAllPropagation,
    SinkAndRecentSelector,
    SnapKV,
    SumScorer,
    TokenSelectivePropagation,
    WindowMaxPoolScorer,
)
from kvpolicy.policies import PyramidInfer as Pyramid


@pytest.mark.parametrize(
    ("policy", "written"),
    [
        (SnapKV(), "SnapKV()"),
        (FastKV(2, 0.5, 0.25), "FastKV(tsp_layer=2, tsp_rate=0.5, retention_rate=0.25)"),
        (FastKV(retention_tokens=64, window_size=4), "FastKV(window_size=4, retention_tokens=64)"),
        (GemFilter(filter_layer=13, protect=4), "GemFilter(filter_layer=13, protect=4)"),
        (Pyramid(0.3, num_sinks=1), "PyramidInfer(recent_rate=0.3, num_sinks=1)"),
        (
            CachePolicy(None, SinkAndRecentSelector(num_sinks=2), PassAllPropagation()),
            "CachePolicy(None, SinkAndRecentSelector(num_sinks=2), PassAllPropagation())",
        ),
        (
            CachePolicy(
                SumScorer([KeyNormScorer(), WindowMaxPoolScorer(4)]),
                GQAGroupSelector(retention_tokens=9),
                TokenSelectivePropagation(3),
            ),
            "CachePolicy(SumScorer(scorers=[KeyNormScorer(), WindowMaxPoolScorer(window_size=4)]), "
            "GQAGroupSelector(retention_tokens=9), TokenSelectivePropagation(tsp_layer=3))",
        ),
    ],
    ids=str,
)
def test_a_policy_prints_as_it_is_written(policy: CachePolicy, written: str) -> None:
    assert str(policy) == written
    assert str(from_description(describe(policy))) == written  # whatever way it came about


class Halved(CachePolicy):
    """A method that keeps none of its arguments."""

    def __init__(self, retention_rate: float = 0.5) -> None:
        selector = GQAGroupSelector(retention_rate / 2)
        super().__init__(WindowMaxPoolScorer(), selector, PassAllPropagation())


def test_a_method_whose_arguments_are_gone_prints_its_parts() -> None:
    parts = "WindowMaxPoolScorer(), GQAGroupSelector(retention_rate=0.2), PassAllPropagation()"
    assert str(Halved(0.4)) == f"Halved({parts})"


def test_parts_are_short_as_str_and_whole_as_repr() -> None:
    part = GQAGroupSelector(0.2)
    assert str(part) == "GQAGroupSelector(retention_rate=0.2)"
    assert "window_size=8" in repr(part)
