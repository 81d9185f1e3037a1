"""What may be given by position, and what could be in the earlier version."""

import inspect
from typing import Any

import attrs
import pytest

import kvpolicy
from kvpolicy import CachePolicy, DecodingEviction, KVSelector, PropagationPolicy, Scorer, policies
from kvpolicy.assignments import PartOption
from kvpolicy.building import build_policy, compose
from kvpolicy.description import describe, from_description
from kvpolicy.evaluation.suite.earlier_names import present_call
from kvpolicy.policies import (
    FastKV,
    FullContext,
    GQAGroupSelector,
    KeyNormScorer,
    PassAllPropagation,
    PyramidInfer,
    SnapKV,
)
from kvpolicy.policies.positions import EARLIER
from kvpolicy.renamed import EarlierWordWarning
from kvpolicy.repetition import Repetition

CLASSES: dict[str, Any] = {
    name: each for name in policies.__all__ if inspect.isclass(each := getattr(policies, name))
}
METHODS = [each for each in CLASSES.values() if issubclass(each, CachePolicy)]
KINDS = (Scorer, KVSelector, PropagationPolicy)
PARTS = [each for each in CLASSES.values() if issubclass(each, KINDS)]
BASES = ("Method", "EvictionMethod")  # which build no parts
# What a part wraps, or its one main number.
MAIN = ("scorer", "scorers", "selector", "stages", "retention_rate", "tsp_rate")
MAIN_OF_FEW = ("mass", "window_size")
SCORER = KeyNormScorer()
SELECTOR = GQAGroupSelector(retention_tokens=9)


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
        if positional(method) and method.__name__ not in BASES:
            assert method(0.15).retention_rate == 0.15


@pytest.mark.parametrize("name", [name for name in EARLIER if name not in BASES])
def test_arguments_by_position_are_taken_as_before(name: str) -> None:
    kind, order = CLASSES[name], EARLIER[name].split()
    parameters = inspect.signature(kind).parameters
    required: Any = {"scorers": [SCORER]}
    values = [required.get(each, parameters[each].default) for each in order]
    for count in range(len(positional(kind)) + 1, len(order) + 1):
        given = dict(zip(order, values[:count], strict=False))
        with pytest.warns(DeprecationWarning, match=f"{order[count - 1]}= of {name} by") as told:
            built = kind(*values[:count])
        assert built == kind(**given)
        assert told[0].filename == __file__


def test_a_layer_in_the_first_place_is_the_layer_it_was() -> None:
    with pytest.warns(DeprecationWarning, match="giving tsp_layer= of FastKV by position"):
        assert FastKV(1) == FastKV(tsp_layer=1)  # type: ignore[arg-type, unused-ignore]
    earlier: Any = (15, 0.3, 0.2)
    with pytest.warns(DeprecationWarning, match="tsp_layer=, tsp_rate=, retention_rate= of FastKV"):
        assert FastKV(*earlier) == FastKV(0.2, tsp_rate=0.3, tsp_layer=15)


def test_the_core_takes_parts_by_position() -> None:
    assert positional(CachePolicy) == ["scorer", "selector", "propagation"]
    assert positional(DecodingEviction) == ["scorer", "selector"]
    assert positional(Repetition) == ["chunk_size"]
    bound = DecodingEviction(SCORER, SELECTOR, every=7)
    earlier: Any = (SCORER, SELECTOR, 7)
    with pytest.warns(DeprecationWarning, match="every= of DecodingEviction by position"):
        assert DecodingEviction(*earlier) == bound
    earlier = (SCORER, SELECTOR, PassAllPropagation(), bound)
    with pytest.warns(DeprecationWarning, match="decoding= of CachePolicy by position"):
        assert CachePolicy(*earlier) == CachePolicy(*earlier[:3], decoding=bound)
    earlier = (5, 1)
    with pytest.warns(DeprecationWarning, match="num_sinks= of Repetition by position"):
        assert Repetition(*earlier) == Repetition(5, num_sinks=1)


@pytest.mark.parametrize(
    ("build", "arguments", "named", "match"),
    [
        (FastKV, (0.2, 8), {}, "takes 1 positional argument, retention_rate; .*tsp_layer=, tsp_r"),
        (SnapKV, (0.2, 8, 7, True), {}, "positional arguments but 5 were given"),
        (SnapKV, (0.2, 8), {"window_size": 4}, "multiple values for keyword argument 'window_siz"),
        (FullContext, (0.2,), {}, "takes 1 positional argument but 2 were given"),
        (PyramidInfer, (0.2,), {"recent_rate": 0.3}, "multiple values for .*'recent_rate'"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_never_worked_by_position(build: Any, arguments: Any, named: Any, match: str) -> None:
    with pytest.raises(TypeError, match=match):
        build(*arguments, **named)


def test_the_library_uses_names(recwarn: pytest.WarningsRecorder) -> None:
    for name, factory in kvpolicy.registered().items():
        built: Any = factory()
        assert attrs.evolve(built) == built, name
    assert [str(each.message) for each in recwarn] == []


# Arguments that have another name now, where a paper's users do not know them by the old one.
RENAMED_ARGUMENTS: list[tuple[Any, str, str, Any]] = [
    (policies.ChunkKV, "chunk_length", "chunk_size", 5),
    (policies.ChunkMeanScorer, "chunk_length", "chunk_size", 5),
    (policies.BlockProductScorer, "unit_size", "chunk_size", 5),
    (policies.BlockProductScorer, "block_units", "block_chunks", 5),
    (policies.BlockMassPropagation, "block_size", "chunk_size", 5),
    (policies.BlockMassPropagation, "drop_layers", "tsp_layers", (1, 3)),
    (policies.AgreementPropagation, "drop_layers", "tsp_layers", (1, 3)),
    (policies.VisualTokenPropagation, "drop_layer", "tsp_layer", 3),
    (policies.VisualTokenPropagation, "visual_rate", "tsp_rate", 0.25),
    (policies.FastV, "drop_layer", "tsp_layer", 3),
    (policies.FastV, "visual_rate", "tsp_rate", 0.25),
    (policies.LazyLLM, "drop_layers", "tsp_layers", (1, 3)),
    (policies.LazyLLM, "keep_rate", "tsp_rate", 0.25),
    (policies.SlimInfer, "unit_size", "chunk_size", 5),
    (policies.SlimInfer, "block_units", "block_chunks", 5),
    (policies.UniPrefill, "drop_layers", "tsp_layers", (1, 3)),
    (policies.UniPrefill, "block_size", "chunk_size", 5),
    (policies.BlockMassPropagation, "num_sinks", "protect", 5),
    (policies.PyramidPropagation, "num_sinks", "protect", 5),
]


@pytest.mark.parametrize(("kind", "old", "new", "value"), RENAMED_ARGUMENTS)
def test_an_argument_under_its_earlier_name(kind: Any, old: str, new: str, value: Any) -> None:
    present = kind(**{new: value})
    with pytest.warns(DeprecationWarning, match=f"{old}= of {kind.__name__} is deprecated") as told:
        assert kind(**{old: value}) == present
    assert told[0].filename == __file__
    with pytest.warns(DeprecationWarning, match=rf"\.{old} is deprecated, use {new}"):
        assert getattr(present, old) == value
    assert old not in inspect.signature(kind).parameters
    assert present_call(repr(present).replace(f"{new}=", f"{old}=")) == repr(present)
    fields = describe(present)
    fields["fields"][old] = fields["fields"].pop(new)
    if issubclass(kind, CachePolicy):
        assert from_description(fields) == present  # without a warning
        with pytest.warns(EarlierWordWarning, match=f"{old} of {kind.__name__} is deprecated, use"):
            assert build_policy(fields["type"], **{old: value}) == present
        return
    place = "scorer" if issubclass(kind, Scorer) else "propagation"
    described = describe(CachePolicy(SCORER, SELECTOR, PassAllPropagation()))
    described["fields"][place] = fields
    built = from_description(described)
    assert getattr(built, place) == present
    parts = {"scorer": PartOption("key_norm"), place: PartOption(fields["type"], {old: value})}
    with pytest.warns(EarlierWordWarning, match=f"{old} of {kind.__name__} is deprecated, use"):
        composed = compose(parts, {})
    assert getattr(composed, place) == present
