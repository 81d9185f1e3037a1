"""Composition, and the registry."""

from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy import CachePolicy, KVSelector, LayerContext, PropagationPolicy, Scorer
from kvpolicy.errors import ShapeError, UnknownPolicyError
from kvpolicy.names import GROUP
from kvpolicy.policies import (
    FastKV,
    GQAGroupSelector,
    KeepAllSelector,
    PassAllPropagation,
    RestartPropagation,
    WindowMaxPoolScorer,
)
from kvpolicy.registry import kind_of
from tests.contexts import layer_context


def test_budgets_of_one_name_are_told_apart_by_their_parts() -> None:
    scorer, restart = (
        WindowMaxPoolScorer(4),
        RestartPropagation(filter_layer=0, retention_rate=0.2, window_size=4),
    )
    CachePolicy(scorer, GQAGroupSelector(0.2), restart)
    message = (
        "retention_rate of GQAGroupSelector must not exceed retention_rate of RestartPropagation, "
        "since layers after the restart .* got 0.3 and 0.2"
    )
    with pytest.raises(ValueError, match=message):
        CachePolicy(scorer, GQAGroupSelector(0.3), restart)


@attrs.frozen
class RestartsAt(RestartPropagation):
    """Says that it acts at any layers."""

    layers: tuple[int, ...] = attrs.field(default=(), kw_only=True)

    def acting_layers(self, num_layers: int) -> frozenset[int]:
        return frozenset(self.layers)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((), r"must be exactly one, since it restarts the prefill, got \[\] for a model of 4"),
        ((2, 0), r"must be exactly one, since it restarts the prefill, got \[0, 2\]"),
        ((4,), r"must be in \[0, 3\] for a model of 4 layers, got \[4\]"),
        ((-1, 2), r"must be in \[0, 3\] for a model of 4 layers, got \[-1, 2\]"),
    ],
)
def test_a_restart_acts_in_one_layer_of_the_model(layers: tuple[int, ...], message: str) -> None:
    policy = CachePolicy(WindowMaxPoolScorer(1), KeepAllSelector(), RestartsAt(layers=layers))
    for use in (policy.check_model, policy.prefill_compute_rate):
        with pytest.raises(ValueError, match="acting_layers of RestartsAt.*" + message):
            use(4)


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
        "streamingllm",
    }
    assert "window_max_pool_scorer" in kvpolicy.registered("scorer")
    everything = kvpolicy.registered()
    kinds = [kvpolicy.registered(kind) for kind in ("policy", "scorer", "selector", "propagation")]
    assert sum(map(len, kinds)) == len(everything)
    assert list(everything) == sorted(everything)
    with pytest.raises(ValueError, match="kind must be one of policy, scorer"):
        kvpolicy.registered("method")


def test_building_by_name() -> None:
    assert kvpolicy.build("fastkv", tsp_layer=3) == FastKV(tsp_layer=3)
    near = r"named 'fastkw' \(did you mean fastkv\?\); known: adakv, chunkkv, "
    assert kvpolicy.build("full-context").prefill_compute_rate(5) == 1.0
    with pytest.raises(UnknownPolicyError, match=near):
        kvpolicy.build("fastkw")
    with pytest.raises(UnknownPolicyError, match="no selector is named 'fastkv'"):
        kvpolicy.build("fastkv", "selector")


def test_arguments_of_the_wrong_kind() -> None:
    policy: Any = FastKV()
    with pytest.raises(TypeError, match="context must be a LayerContext, got None"):
        policy.decide(None)
    with pytest.raises(TypeError, match="other must be a Budget, got 3"):
        policy.selector.budget.exceeds(3)
    with pytest.raises(TypeError, match="name must be a str, got None"):
        kvpolicy.build(None)  # type: ignore[arg-type]


def test_a_third_partys_entry_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        name = "constant"

        def load(self) -> type[Scorer]:
            return Constant

    def entry_points(group: str) -> list[Entry]:
        assert group == GROUP
        return [Entry()]

    monkeypatch.setattr("kvpolicy.names.entry_points", entry_points)
    assert kvpolicy.registered("scorer") == {"constant": Constant}
    assert isinstance(kvpolicy.build("constant", "scorer"), Constant)


def test_what_is_no_part_is_refused() -> None:
    with pytest.raises(TypeError, match=r"an entry of kvpolicy\.policies must build a CachePolicy"):
        kind_of(dict)  # type: ignore[arg-type]


def layer() -> LayerContext:
    return layer_context(torch.randn(1, 2, 11, 5), queries=torch.randn(1, 6, 3, 5))


@attrs.frozen
class Returns(Scorer, KVSelector, PropagationPolicy):
    """Returns what it was given, as any part."""

    value: Tensor = attrs.field(eq=False)

    @property
    def needs_saliency(self) -> bool:
        return False

    def acting_layers(self, num_layers: int) -> frozenset[int]:
        return frozenset({0})

    def score(self, context: LayerContext) -> Tensor:
        return self.value

    def select(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        return self.value

    def propagate(self, saliency: Tensor | None, context: LayerContext) -> Tensor:
        return self.value


@pytest.mark.parametrize(
    ("role", "value", "error", "message"),
    [
        ("scorer", torch.zeros(1, 11), ShapeError, r"score of .* \[1, 6 or 2, 11\], got \[1, 11\]"),
        ("scorer", torch.zeros(1, 2, 3), ShapeError, "score of"),
        ("scorer", None, TypeError, "score of .* must return a tensor of floats, got None"),
        ("scorer", torch.zeros(1, 2, 11).long(), TypeError, "must return a tensor of floats"),
        ("scorer", torch.full((1, 2, 11), float("nan")), ValueError, "got NaN at layer 0"),
        ("selector", [[0]], TypeError, r"must return a tensor of indices, got \[\[0\]\]"),
        ("selector", torch.zeros(1, 3).long(), ShapeError, "must return int64 indices of shape"),
        ("selector", torch.ones(1, 2, 3), ShapeError, "got torch.float32"),
        ("selector", torch.tensor([[[4, 3], [1, 2]]]), ValueError, "ascending, unique and in"),
        ("selector", torch.tensor([[[4, 4], [1, 2]]]), ValueError, "ascending, unique and in"),
        ("selector", torch.tensor([[[4, 11], [1, 2]]]), ValueError, r"in \[0, 11\)"),
        ("selector", torch.tensor([[[4, -1], [1, 2]]]), ValueError, "-1 on the left only"),
        ("selector", torch.tensor([[[-2, 1], [1, 2]]]), ValueError, "ascending, unique and in"),
        ("propagation", torch.tensor([3, 10]), ShapeError, r"shape \[1, 'count'\]"),
        ("propagation", torch.tensor([[10, 3]]), ValueError, "ascending, unique and in"),
        ("propagation", torch.tensor([[3, 9]]), ValueError, "must pass on the last token .* 10"),
        ("propagation", torch.zeros(1, 0).long(), ValueError, "must pass on the last token"),
    ],
)
def test_what_a_part_returns_is_checked(
    role: str, value: Tensor, error: type[Exception], message: str
) -> None:
    parts: dict[str, Any] = {
        "scorer": WindowMaxPoolScorer(3),
        "selector": GQAGroupSelector(),
        "propagation": PassAllPropagation(),
    }
    parts[role] = Returns(value)
    with pytest.raises(error, match=message):
        CachePolicy(**parts).decide(layer())


def test_padding_on_the_left_of_indices_is_right() -> None:
    kept = torch.tensor([[[-1, -1, 3], [0, 4, 10]]])
    policy = CachePolicy(None, Returns(kept), PassAllPropagation())
    assert torch.equal(policy.decide(layer()).kept, kept)
