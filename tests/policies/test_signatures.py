"""What may be given by position."""

import inspect
from typing import Any

import attrs
import pytest

import kvpolicy
from kvpolicy import CachePolicy, DecodingEviction, KVSelector, PropagationPolicy, Scorer, policies
from kvpolicy.policies import FastKV, SnapKV
from kvpolicy.repetition import Repetition

CLASSES: dict[str, Any] = {
    name: each for name in policies.__all__ if inspect.isclass(each := getattr(policies, name))
}
METHODS = [each for each in CLASSES.values() if issubclass(each, CachePolicy)]
KINDS = (Scorer, KVSelector, PropagationPolicy)
PARTS = [each for each in CLASSES.values() if issubclass(each, KINDS)]
# What a part wraps, or its one main number.
MAIN = ("scorer", "scorers", "selector", "stages", "retention_rate", "tsp_rate")


def positional(kind: type[Any]) -> list[str]:
    parameters = inspect.signature(kind).parameters.values()
    return [each.name for each in parameters if each.kind is not each.KEYWORD_ONLY]


def test_all_classes_are_seen() -> None:
    assert len(METHODS) > 25
    assert len(PARTS) > 35


@pytest.mark.parametrize("method", METHODS)
def test_a_method_takes_its_retention_rate_by_position_and_nothing_else(method: type[Any]) -> None:
    rated = "retention_rate" in inspect.signature(method).parameters
    assert positional(method) == ["retention_rate"] * rated


@pytest.mark.parametrize("part", PARTS)
def test_a_part_takes_what_it_wraps_or_its_main_number_by_position(part: type[Any]) -> None:
    names = inspect.signature(part).parameters
    found = positional(part)
    main = next((name for name in MAIN if name in names), None)
    if main is None and issubclass(part, Scorer):
        assert found in ([], ["window_size"])
    elif main is None:
        assert found in ([], ["mass"])
    else:
        assert found == [main]


def test_a_first_argument_is_the_rate() -> None:
    assert FastKV(0.15) == FastKV(retention_rate=0.15)
    assert SnapKV(0.2) == SnapKV(retention_rate=0.2)
    for method in METHODS:
        if positional(method):
            assert method(0.15).retention_rate == 0.15


def test_the_core_takes_parts_by_position() -> None:
    assert positional(CachePolicy) == ["scorer", "selector", "propagation"]
    assert positional(DecodingEviction) == ["scorer", "selector"]
    assert positional(Repetition) == ["chunk_size"]


def test_every_part_evolves_to_itself() -> None:
    for name, factory in kvpolicy.registered().items():
        built: Any = factory()
        assert attrs.evolve(built) == built, name
