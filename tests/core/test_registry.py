"""Names of policies and parts: how they are made and written; broken entries of other packages."""

import tomllib
import warnings
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest

import kvpolicy
from kvpolicy import registry
from kvpolicy.assignments import PartOption
from kvpolicy.description import describe, from_description
from kvpolicy.errors import UnknownPolicyError
from kvpolicy.evaluation.chosen import chosen_variants
from kvpolicy.evaluation.policy_options import PolicyOptions
from kvpolicy.names import GROUP, check_declared
from kvpolicy.policies import (
    TOVA,
    ExpectedAttention,
    KeyNormScorer,
    PyramidPropagation,
    PyramidSelector,
    SnapKV,
    WindowMaxPoolScorer,
)
from kvpolicy.registry import KINDS, build_policy, check_names, compose, name_of

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
DECLARED: dict[str, str] = tomllib.loads(PROJECT.read_text())["project"]["entry-points"][GROUP]
# Two words where they are written so.
TWO_WORDS = {"full_context", "expected_attention", "key_norm"}
OWN = list(kvpolicy.registered())
BROKEN = {
    "gone": "kvpolicy.policies:NoSuchScorer",
    "no_module": "no_such_package_at_all:Scorer",
    "a_number": "math:pi",
    "another_class": "builtins:dict",
    "abstract": "kvpolicy:Scorer",
    "needs_arguments": "kvpolicy.policies:ValueAwareScorer",
}


@pytest.fixture(autouse=True)
def _forget_warnings() -> Iterator[None]:
    registry._warn_of.cache_clear()
    yield
    registry._warn_of.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, **more: str) -> None:
    """Entries of another package beside our own, by name."""
    own = list(entry_points(group=GROUP))
    entries = [EntryPoint(name, place, GROUP) for name, place in more.items()]
    monkeypatch.setattr("kvpolicy.names.entry_points", lambda group: [*entries, *own])


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_entry_is_named_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    install(monkeypatch, **{name: BROKEN[name]})
    with pytest.warns(UserWarning, match=f"entry {name} = '{BROKEN[name]}' .* is ignored") as said:
        everything = kvpolicy.registered()
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it has been said
        assert "snapkv" in kvpolicy.registered("policy")
        assert kvpolicy.build("snapkv") == SnapKV()
    assert list(everything) == OWN


def test_policies_are_described_and_built_beside_broken_entries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, **BROKEN)
    with pytest.warns(UserWarning, match="is ignored") as said:
        assert from_description(describe(SnapKV(0.3))) == SnapKV(0.3)
    assert len(said) == len(BROKEN)


def test_whole_entries_say_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(kvpolicy.registered()) == OWN


def test_declared_names_are_the_registered_ones() -> None:
    """What is said without loading anything is what is said of the loaded entries."""
    for kind in KINDS:
        with pytest.raises(UnknownPolicyError) as early:
            check_declared({kind: ["zzz"]})
        with pytest.raises(UnknownPolicyError) as late:
            check_names({kind: ["zzz"]})
        assert str(early.value) == str(late.value)
        assert f"known: {', '.join(kvpolicy.registered(kind))}" in str(early.value)
        check_declared({kind: kvpolicy.registered(kind)})


def test_another_packages_names_are_left_to_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its code says whether an entry is a policy or a part."""
    install(monkeypatch, mine="kvpolicy.policies.methods.snapkv:SnapKV")
    check_declared({"policy": ["mine", "zzz"], "selector": ["mine"]})
    check_names({"policy": ["mine"]})
    with pytest.raises(UnknownPolicyError, match="policy is named 'zzz'; known: adakv.* mine, "):
        check_names({"policy": ["mine", "zzz"]})
    with pytest.raises(UnknownPolicyError, match="no selector is named 'mine'; known: adaptive"):
        check_names({"selector": ["mine"]})


@pytest.mark.parametrize("kind", KINDS)
def test_the_name_of_a_class_is_understood(kind: str) -> None:
    for name, factory in kvpolicy.registered(kind).items():
        written = factory.__name__
        for each in (written, written.upper(), written.lower()):
            assert name_of(each, kind) == name
        if kind != "policy":
            assert name_of(written[: -len(kind)], kind) == name


def test_classes_names_wherever_a_policy_is_named() -> None:
    assert kvpolicy.build("SnapKV", retention_rate=0.3) == SnapKV(0.3)
    assert build_policy("ExpectedAttention") == ExpectedAttention()
    built = compose({"scorer": PartOption("KeyNorm")}, {})
    assert built.scorer == KeyNormScorer()
    options = PolicyOptions(names=("FullContext", "full-context", "FastKV"), rates=(0.2,))
    assert [each.label for each in chosen_variants(options, ())] == ["full_context", "fastkv 0.2"]
    with pytest.raises(UnknownPolicyError, match=r"named 'SnapVK' \(did you mean snapkv\?\)"):
        kvpolicy.build("SnapVK")


def test_a_name_that_could_be_two_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, snap_kv="kvpolicy.policies.methods.tova:TOVA")
    assert kvpolicy.build("snap-kv") == TOVA()
    assert kvpolicy.build("snapkv") == SnapKV()
    for other in ("SnapKV", "SNAP_KV"):
        with pytest.raises(
            UnknownPolicyError, match=r"did you mean (snapkv or snap_kv|snap_kv or snapkv)"
        ):
            kvpolicy.build(other)


def test_names_are_those_of_the_classes() -> None:
    found = kvpolicy.registered()
    assert set(found) == set(DECLARED)
    for name, place in DECLARED.items():
        class_name = place.rpartition(":")[2]
        assert name.replace("_", "") == class_name.lower()
        (kind,) = [kind for kind in KINDS if name in kvpolicy.registered(kind)]
        if kind == "policy":
            assert name in TWO_WORDS or "_" not in name
        else:
            assert name.endswith(f"_{kind}")


def test_a_parts_kind_may_be_left_out_where_it_is_said() -> None:
    assert name_of("gqa-group", "selector") == "gqa_group_selector"
    assert kvpolicy.build("key_norm", "scorer") == KeyNormScorer()
    assert kvpolicy.build("pyramid", "selector") == PyramidSelector()
    assert kvpolicy.build("pyramid", "propagation") == PyramidPropagation()
    assert kvpolicy.build("window_max_pool_scorer", "scorer") == WindowMaxPoolScorer()
    with pytest.raises(UnknownPolicyError, match="no policy is named 'gqa_group'"):
        kvpolicy.build("gqa_group")
