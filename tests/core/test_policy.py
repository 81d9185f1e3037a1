"""Composition, and the registry."""

from typing import Any

import pytest
from torch import Tensor

import kvpolicy
from kvpolicy import CachePolicy, LayerContext, Scorer
from kvpolicy.errors import UnknownPolicyError
from kvpolicy.policies import (
    FastKV,
    GQAGroupSelector,
    PassAllPropagation,
    SinkAndRecentSelector,
    TokenSelectivePropagation,
    WindowMaxPoolScorer,
)
from kvpolicy.registry import GROUP, kind_of


def test_a_scorer_is_needed_where_saliency_is() -> None:
    with pytest.raises(ValueError, match="scorer must be a Scorer, since GQAGroupSelector"):
        CachePolicy(None, GQAGroupSelector(), PassAllPropagation())
    CachePolicy(None, SinkAndRecentSelector(), PassAllPropagation())


def test_the_unscored_window_must_be_protected() -> None:
    with pytest.raises(ValueError, match="must be at least 8, .* got 4"):
        CachePolicy(WindowMaxPoolScorer(8), GQAGroupSelector(window_size=4), PassAllPropagation())
    with pytest.raises(ValueError, match="TokenSelectivePropagation"):
        CachePolicy(
            WindowMaxPoolScorer(8), GQAGroupSelector(), TokenSelectivePropagation(window_size=7)
        )


@pytest.mark.parametrize(
    "parts",
    [
        ("scorer", GQAGroupSelector(), PassAllPropagation()),
        (None, WindowMaxPoolScorer(), PassAllPropagation()),
        (None, SinkAndRecentSelector, PassAllPropagation()),
        (None, SinkAndRecentSelector(), None),
    ],
)
def test_parts_of_the_wrong_kind(parts: Any) -> None:
    with pytest.raises(TypeError, match="must be a (Scorer|KVSelector|PropagationPolicy), got"):
        CachePolicy(*parts)


def test_abstract_methods_are_abstract() -> None:
    class Incomplete(Scorer):
        pass

    with pytest.raises(TypeError, match="abstract"):
        Incomplete()  # type: ignore[abstract]


class Constant(Scorer):
    def score(self, context: LayerContext) -> Tensor:
        return context.keys.float().sum(-1) * 0


def test_the_registry_knows_the_kinds() -> None:
    assert set(kvpolicy.registered("policy")) >= {
        "fastkv",
        "full_context",
        "snapkv",
        "streaming_llm",
    }
    assert "window_max_pool" in kvpolicy.registered("scorer")
    everything = kvpolicy.registered()
    kinds = [kvpolicy.registered(kind) for kind in ("policy", "scorer", "selector", "propagation")]
    assert sum(map(len, kinds)) == len(everything)
    assert list(everything) == sorted(everything)
    with pytest.raises(ValueError, match="kind must be one of policy, scorer"):
        kvpolicy.registered("method")


def test_building_by_name() -> None:
    assert kvpolicy.build("fastkv", tsp_layer=3) == FastKV(tsp_layer=3)
    assert kvpolicy.build("full-context").prefill_compute_rate(5) == 1.0
    with pytest.raises(UnknownPolicyError, match="no policy is named 'fastkw'; known: fastkv, "):
        kvpolicy.build("fastkw")
    with pytest.raises(UnknownPolicyError, match="no selector is named 'fastkv'"):
        kvpolicy.build("fastkv", "selector")


def test_a_third_partys_entry_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        name = "constant"

        def load(self) -> type[Scorer]:
            return Constant

    def entry_points(group: str) -> list[Entry]:
        assert group == GROUP
        return [Entry()]

    monkeypatch.setattr("kvpolicy.registry.entry_points", entry_points)
    assert kvpolicy.registered("scorer") == {"constant": Constant}
    assert isinstance(kvpolicy.build("constant", "scorer"), Constant)


def test_what_is_no_part_is_refused() -> None:
    with pytest.raises(TypeError, match=r"an entry of kvpolicy\.policies must build a CachePolicy"):
        kind_of(dict)  # type: ignore[arg-type]
