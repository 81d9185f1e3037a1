"""Policies and parts print as one writes them."""

from typing import Any

import attrs
import pytest

import kvpolicy
from kvpolicy import CachePolicy
from kvpolicy.description import describe, from_description
from kvpolicy.policies import GQAGroupSelector, PassAllPropagation, SnapKV, WindowMaxPoolScorer
from tests.policies.written import made


@pytest.mark.parametrize(
    "written",
    [
        "SnapKV(retention_rate=0.1)",
        "FastKV(retention_rate=0.25, tsp_layer=2, tsp_rate=0.5)",
        "FastKV(tsp_rate=0.2, window_size=4, retention_tokens=64)",
        "GemFilter(retention_rate=0.1, filter_layer=13, protect=4)",
        "PyramidInfer(recent_rate=0.3, num_sinks=1)",
        "CachePolicy(None, SinkAndRecentSelector(retention_rate=0.1, num_sinks=2), "
        "PassAllPropagation())",
        "CachePolicy(SumScorer(scorers=[KeyNormScorer(), WindowMaxPoolScorer(window_size=4)]), "
        "GQAGroupSelector(retention_tokens=9), "
        "TokenSelectivePropagation(tsp_rate=0.2, tsp_layer=3))",
    ],
)
def test_a_policy_prints_as_it_is_written(written: str) -> None:
    policy = made(written)
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


# An argument of each kind that is not its default, where a method has it.
OTHERS: dict[str, Any] = {
    "retention_tokens": 96,
    "tsp_layer": 3,
    "window_size": 5,
    "protect": 2,
    "decoding": 64,
    "instruction_ids": [1, 2],
    "tsp_layers": (2, 4),
    "tsp_rate": 0.4,
    "recent_rate": 0.3,
    "gapless": False,
}
METHODS: dict[str, Any] = {
    name: kind
    for name, kind in kvpolicy.registered("policy").items()
    if kind.__module__.startswith("kvpolicy.policies.")
}


def changed(kind: Any) -> CachePolicy:
    """A method with as many arguments as can be other than their defaults."""
    fields = {each.name for each in attrs.fields(kind) if each.init}
    given = {name: value for name, value in OTHERS.items() if name in fields}
    if not kind().has_decoding_rule:
        del given["decoding"]
    policy: CachePolicy = kind(**given)
    return policy


def test_all_methods_are_here() -> None:
    assert len(METHODS) == 30


@pytest.mark.parametrize("name", METHODS)
def test_what_a_method_prints_builds_it(name: str) -> None:
    for policy in (METHODS[name](), changed(METHODS[name])):
        for code in (repr(policy), str(policy)):
            built = made(code)
            assert built == policy
            assert repr(built) == repr(policy)
            assert describe(built) == describe(policy)
    assert METHODS[name]() != changed(METHODS[name]) or name == "full_context"


@pytest.mark.parametrize("kind", ["policy", "selector", "propagation"])
def test_rates_are_shown_at_their_defaults(kind: Any) -> None:
    shown = 0
    for factory in kvpolicy.registered(kind).values():
        built: Any = factory()
        for field in attrs.fields(type(built)):
            value = getattr(built, field.name)
            if field.name.endswith("_rate") and value is not None:
                assert f"{field.name}={value}" in str(built)
                assert f"{field.name}={value}" in repr(built)
                shown += 1
    assert shown >= 5


def test_a_number_of_tokens_is_shown_in_place_of_a_rate() -> None:
    assert str(SnapKV(retention_tokens=64)) == "SnapKV(retention_tokens=64)"
    assert str(GQAGroupSelector(retention_tokens=64)) == "GQAGroupSelector(retention_tokens=64)"
