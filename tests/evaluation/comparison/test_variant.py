"""Which policies a comparison builds, third parties' among them."""

import inspect
from typing import Any

import pytest

from kvpolicy import CachePolicy, registry
from kvpolicy.errors import UnknownPolicyError
from kvpolicy.evaluation import build_policy, variants
from kvpolicy.evaluation.chosen import chosen_variants
from kvpolicy.evaluation.variant import takes
from kvpolicy.evaluation.options import PolicyOptions
from kvpolicy.policies import ChunkKV, FastKV, FastV, FullContext, SnapKV, StreamingLLM
from kvpolicy.registry import parameters_of


def test_rates_for_those_that_take_one_and_once_for_the_others() -> None:
    found = {each.label: each.policy for each in variants(rates=[0.2, 0.5, 0.2])}
    assert found["full_context"] == FullContext()
    assert found["snapkv 0.2"] == SnapKV(0.2)
    assert found["streamingllm 0.5"] == StreamingLLM(0.5)
    assert set(registry.registered("policy")) == {label.split()[0] for label in found}


def test_names_may_have_dashes_and_repeat() -> None:
    names = ["full-context", "streamingllm", "full_context", "streamingllm"]
    found = variants(names, rates=[0.1])
    assert [each.label for each in found] == ["full_context", "streamingllm 0.1"]


def test_tsp_layer_goes_to_those_that_leave_it_open() -> None:
    """FastV's own is a fixed one, near the first layer of any model."""
    fast, snap, image = variants(["fastkv", "snapkv", "fastv"], rates=[0.1], tsp_layer=3)
    assert image.policy == FastV(tsp_layer=1)
    (image,) = chosen_variants(PolicyOptions(names=("fastv",)), [0.1], tsp_layer=3)
    assert image.policy == FastV(tsp_layer=1)
    told = PolicyOptions(names=("fastv",), assignments={"tsp_layer": 2})
    assert chosen_variants(told, [0.1], tsp_layer=3)[0].policy == FastV(tsp_layer=2)
    assert fast.policy == FastKV(tsp_layer=3, retention_rate=0.1)
    assert fast.parameters == {"retention_rate": 0.1, "tsp_layer": 3}
    assert snap.parameters == {"retention_rate": 0.1}


def test_tsp_rate_is_raised_where_retention_exceeds_it() -> None:
    low, equal, high = variants(["fastkv"], rates=[0.1, 0.2, 0.35])
    assert "tsp_rate" not in low.parameters
    assert "tsp_rate" not in equal.parameters
    assert high.policy == FastKV(tsp_rate=0.35, retention_rate=0.35)
    assert high.parameters["tsp_rate"] == 0.35


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.5, float("nan")])
def test_bad_rate(rate: float) -> None:
    with pytest.raises(ValueError, match=r"retention_rate must be in \(0, 1\]"):
        variants(["fastkv"], rates=[rate])


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UnknownPolicyError, match="fastkv, fastv, full_context"):
        variants(["nope"])


def test_parameter_that_a_policy_lacks() -> None:
    with pytest.raises(ValueError, match="snapkv takes no tsp_rate; it takes retention_rate"):
        build_policy("snapkv", tsp_rate=0.3)
    with pytest.raises(ValueError, match="full_context takes no retention_rate; it takes decoding"):
        build_policy("full_context", retention_rate=0.3)


def test_third_party_factories(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_rate(*, retention_rate: float = 0.3) -> CachePolicy:
        return SnapKV(retention_rate)

    def with_anything(*args: Any, **kwargs: Any) -> CachePolicy:
        return SnapKV(*args, **kwargs)

    factories = {"anything": with_anything, "rated": with_rate}
    monkeypatch.setattr("kvpolicy.evaluation.variant.registered", lambda kind=None: factories)
    monkeypatch.setattr("kvpolicy.registry.registered", lambda kind=None: factories)
    found = variants(rates=[0.1, 0.2])
    assert [each.label for each in found] == ["anything", "rated 0.1", "rated 0.2"]
    assert found[2].policy == SnapKV(0.2)


def test_parameters_of() -> None:
    assert parameters_of(FullContext) == {"decoding": None}
    assert parameters_of(SnapKV)["window_size"] == 8
    assert parameters_of(lambda needed, *args, **kwargs: None) == {
        "needed": inspect.Parameter.empty
    }
    assert parameters_of(type) == {}  # a signature that cannot be read
    assert takes("fastkv", "tsp_layer")
    assert not takes("snapkv", "tsp_layer")


def test_arguments_are_of_the_policies_that_take_them() -> None:
    options = PolicyOptions(names=("chunkkv", "snapkv"), assignments={"chunk_size": 5})
    found = chosen_variants(options, [0.2])
    assert [each.policy for each in found] == [ChunkKV(0.2, chunk_size=5), SnapKV(0.2)]
    options = PolicyOptions(names=("snapkv",), assignments={"chunk_size": 5})
    with pytest.raises(ValueError, match="--set chunk_size must name a parameter of a chosen"):
        chosen_variants(options, [0.2])
