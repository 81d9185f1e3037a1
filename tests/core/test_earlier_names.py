"""Registered names follow one rule; those of the earlier version are understood, with a warning."""

import re
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest

import kvpolicy
from kvpolicy import CachePolicy
from kvpolicy.assignments import PartOption
from kvpolicy.building import build_policy, compose, factory_of
from kvpolicy.description import describe, from_description, with_new_names
from kvpolicy.errors import UnknownPolicyError
from kvpolicy.names import EARLIER, GROUP
from kvpolicy.policies import (
    AdaKV,
    ExpectedAttentionScorer,
    GQAGroupSelector,
    KeyNormScorer,
    LagKVScorer,
    PassAllPropagation,
    PyramidPropagation,
    PyramidSelector,
    StagedPropagation,
    VisualTokenPropagation,
    WindowMaxPoolScorer,
)
from kvpolicy.registry import name_of
from kvpolicy.renamed import EarlierWordWarning, warn_of_word, words_told

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
DECLARED: dict[str, str] = tomllib.loads(PROJECT.read_text())["project"]["entry-points"][GROUP]
KINDS = ("policy", "scorer", "selector", "propagation")
# Two words where they are written so.
TWO_WORDS = {"full_context", "expected_attention", "key_norm"}
AS_BEFORE = {"key_norm_scorer", "pyramid_selector", "random_scorer"}
EARLIER_PARTS = {
    "lag": ("scorer", LagKVScorer()),
    "expected": ("scorer", ExpectedAttentionScorer()),
    "key_diff_scorer": ("scorer", kvpolicy.build("keydiff_scorer", "scorer")),
    "visual_tokens": ("propagation", VisualTokenPropagation()),
}


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


@pytest.mark.parametrize("name", sorted(EARLIER.keys() - {"pyramid"}))
def test_an_earlier_name_is_understood(name: str) -> None:
    kind, part = EARLIER_PARTS.get(name, ("policy", None))
    for written in (name, name.replace("_", "-")):
        with pytest.warns(EarlierWordWarning, match=f"{written} is deprecated, use ") as told:
            built = kvpolicy.build(written, kind)
        assert told[0].filename == __file__
        assert {str(each.message) for each in told} == {
            f"the name {written} is deprecated, use {EARLIER[name]}"
        }
    assert type(built) is kvpolicy.registered(kind)[EARLIER[name]]
    assert part is None or built == part
    assert issubclass(EarlierWordWarning, DeprecationWarning)


def test_every_earlier_name_leads_somewhere_else() -> None:
    assert set(EARLIER.values()) <= set(DECLARED)
    assert not EARLIER.keys() & DECLARED.keys()


def test_a_parts_kind_may_be_left_out_where_it_is_said() -> None:
    assert name_of("gqa-group", "selector") == "gqa_group_selector"
    assert kvpolicy.build("key_norm", "scorer") == KeyNormScorer()
    assert kvpolicy.build("pyramid", "selector") == PyramidSelector()
    assert kvpolicy.build("pyramid", "propagation") == PyramidPropagation()
    assert kvpolicy.build("window_max_pool_scorer", "scorer") == WindowMaxPoolScorer()
    with pytest.raises(UnknownPolicyError, match="no policy is named 'gqa_group'"):
        kvpolicy.build("gqa_group")


def test_earlier_names_wherever_a_policy_is_built() -> None:
    with pytest.warns(EarlierWordWarning, match="the name ada_kv is deprecated, use adakv"):
        assert build_policy("ada_kv", floor=0.5) == AdaKV(floor=0.5)
    with pytest.warns(EarlierWordWarning, match="the name lag is"):
        assert factory_of("lag", "scorer") is LagKVScorer
    with pytest.warns(EarlierWordWarning, match="the name expected is"):
        built = compose({"scorer": PartOption("expected", {"epsilon": 0.5})}, {})
    assert built.scorer == ExpectedAttentionScorer(epsilon=0.5)


def renamed(described: Any) -> Any:
    """The description with the names that the earlier version wrote."""
    if isinstance(described, list):
        return [renamed(each) for each in described]
    if not isinstance(described, dict):
        return described
    earlier = {new: old for old, new in EARLIER.items()}
    kind = described.get("type")
    short = re.sub("_(scorer|selector|propagation)$", "", str(kind))
    name = kind if kind in AS_BEFORE else earlier.get(str(kind), short)
    return {key: name if key == "type" else renamed(each) for key, each in described.items()}


def test_a_saved_description_with_earlier_names() -> None:
    """A file is nothing that its reader could write anew: it loads without a warning."""
    for policy in (
        AdaKV(0.3, floor=0.5),
        CachePolicy(LagKVScorer(), GQAGroupSelector(0.4), PassAllPropagation()),
        CachePolicy(
            WindowMaxPoolScorer(),
            PyramidSelector(retention_tokens=12),
            StagedPropagation([VisualTokenPropagation(tsp_layer=2, window_size=8)]),
        ),
        CachePolicy(KeyNormScorer(), GQAGroupSelector(), PyramidPropagation()),
    ):
        earlier = renamed(describe(policy))
        assert earlier != describe(policy)
        assert with_new_names(earlier) == describe(policy)
        assert from_description(earlier) == policy


def test_an_installation_of_the_earlier_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """An editable one has the entry points of the day it was made."""

    class Entry:
        def __init__(self, name: str, value: str) -> None:
            self.name, self.value = name, value

        def load(self) -> Any:
            return getattr(kvpolicy.policies, self.value.rpartition(":")[2])

    earlier = [
        Entry("ada_kv", "kvpolicy.policies:AdaKV"),
        Entry("gqa_group", "kvpolicy.policies:GQAGroupSelector"),
        Entry("pyramid_selector", "kvpolicy.policies:PyramidSelector"),
        Entry("lag", "theirs:LagKVScorer"),  # a name of their own
    ]
    monkeypatch.setattr("kvpolicy.names.entry_points", lambda group: earlier)
    assert list(kvpolicy.registered()) == ["adakv", "gqa_group_selector", "lag", "pyramid_selector"]
    assert kvpolicy.build("lag", "scorer") == LagKVScorer()  # without a warning


def test_a_command_line_tells_a_word_once(capsys: pytest.CaptureFixture[str]) -> None:
    with words_told():
        for name in ("a", "b", "a"):
            warn_of_word(f"the name {name}", "c")
    assert capsys.readouterr().err == (
        "warning: the name a is deprecated, use c\nwarning: the name b is deprecated, use c\n"
    )
    with pytest.warns(UserWarning, match="other"), words_told():
        warnings.warn("other", stacklevel=1)
