"""Names that users know keep working for one version under their earlier form, and warn."""

import copy
import importlib
import inspect
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

import kvpolicy
from kvpolicy import (
    CachePolicy,
    DecodingEviction,
    LayerContext,
    Scorer,
    host_counts,
    known,
    part_calls,
    policies,
)
from kvpolicy.decision import Decision
from kvpolicy.declarations import declares
from kvpolicy.description import describe, from_description
from kvpolicy.layer_inputs import AttentionSettings, DecodingInputs
from kvpolicy.policies import (
    H2O,
    AccumulatedAttentionScorer,
    GlobalThresholdSelector,
    GQAGroupSelector,
    KVzip,
    PassAllPropagation,
    PeakAttentionScorer,
    SnapKV,
    SumScorer,
)
from kvpolicy.repetition import Repetition
from kvpolicy.testing import check_scorer

PARTS: Any = (PeakAttentionScorer(), GlobalThresholdSelector(0.3), PassAllPropagation())
EARLIER: Any = {"reading": Repetition(7)}


def layer(length: int = 5, **changes: Any) -> LayerContext:
    generator = torch.Generator().manual_seed(3)
    context = LayerContext(
        layer_idx=0,
        num_layers=1,
        queries=torch.randn(1, 6, length, 7, generator=generator),
        keys=torch.randn(1, 2, length, 7, generator=generator),
        values=torch.randn(1, 2, length, 7, generator=generator),
        positions=torch.arange(length).expand(1, 2, -1),
        new_valid=torch.ones(1, length, dtype=torch.bool),
        seen_len=(length,),
        attention=AttentionSettings(1.0),
    )
    return attrs.evolve(context, **changes)


def warning(of: str) -> Any:
    return pytest.warns(DeprecationWarning, match=f"{of} is deprecated, use ")


def test_counts_under_their_earlier_module() -> None:
    for name in ("known_counts", "protected_counts", "counts_under", "on_device"):
        with pytest.warns(DeprecationWarning, match=rf"use kvpolicy\.host_counts\.{name}"):
            assert getattr(known, name) is getattr(host_counts, name)
    with pytest.raises(AttributeError, match="nothing_such"):
        known.nothing_such  # noqa: B018


@pytest.mark.parametrize(
    ("package", "name", "home"),
    [
        (kvpolicy, "DefaultRate", "kvpolicy.budgets"),
        (policies, "Method", "kvpolicy.policies.methods.method"),
        (policies, "EvictionMethod", "kvpolicy.policies.methods.eviction"),
        (policies, "documented", "kvpolicy.policies.documentation"),
    ],
)
def test_machinery_that_was_public(package: Any, name: str, home: str) -> None:
    message = f"^{package.__name__}.{name} is deprecated, use {home}.{name}$"
    with pytest.warns(DeprecationWarning, match=message) as told:
        found = getattr(package, name)
    assert told[0].filename == __file__
    assert found is getattr(importlib.import_module(home), name)
    assert name not in package.__all__
    with pytest.raises(AttributeError, match="nothing_such"):
        package.nothing_such  # noqa: B018


def test_the_call_of_update() -> None:
    with warning(r"kvpolicy\.part_calls\.advanced"):
        assert part_calls.advanced is part_calls.updated
    with pytest.raises(AttributeError, match="nothing_such"):
        part_calls.nothing_such  # noqa: B018


def test_the_state_of_a_context() -> None:
    state = torch.ones(1, 2, 5, 1)
    context = attrs.evolve(layer(), decoding=DecodingInputs(state))
    with warning(r"LayerContext\.carried") as told:
        assert context.carried is state
    assert told[0].filename == __file__


def test_the_state_of_a_decision() -> None:
    state = torch.ones(1, 2, 5, 1)
    decision = Decision(None, None, state)
    with warning(r"Decision\.carried"):
        assert decision.carried is state


def test_the_state_of_a_decoding_rule() -> None:
    rule = DecodingEviction(AccumulatedAttentionScorer(), GQAGroupSelector(retention_tokens=4))
    with warning(r"DecodingEviction\.carries"):
        assert rule.carries == 1
    with warning(r"DecodingEviction\.carry"):
        assert torch.equal(rule.carry(layer()), rule.update_state(layer()))


def test_a_scorer_of_ours_has_its_earlier_names() -> None:
    scorer = SumScorer([AccumulatedAttentionScorer()], weights=[2.0])
    with warning(r"\w+\.carries") as told:
        assert scorer.carries == 1
    assert told[0].filename == __file__
    with warning(r"\w+\.advance"):
        found = scorer.advance(layer())
    for each, expected in zip(found, scorer.update(layer()), strict=True):
        assert torch.equal(each, expected)
    with warning(r"^Scorer\.carries"):  # which this one leaves to the base
        assert PeakAttentionScorer().carries == 0
    with warning(r"^Scorer\.advance"):
        assert PeakAttentionScorer().advance(layer())[1].shape == (1, 2, 5, 0)


def earlier_scorer() -> Any:
    """A scorer of a third party, written against the earlier version."""

    @attrs.frozen
    class Sums(Scorer):
        starts: float = 0.0

        @property
        def num_queries(self) -> int | None:
            return None

        @property
        def accumulates(self) -> bool:
            return True

        @property
        def carries(self) -> int:
            return 1

        def score(self, context: LayerContext) -> Tensor:
            return AccumulatedAttentionScorer().score(context)

        def advance(self, context: LayerContext) -> tuple[Tensor, Tensor]:
            shown = AccumulatedAttentionScorer().update(context)
            return shown[0] + self.starts, shown[1] + self.starts

    return Sums


def test_a_scorer_written_with_the_earlier_names() -> None:
    with pytest.warns(DeprecationWarning, match="is deprecated") as told:
        kind = earlier_scorer()
    assert [str(each.message) for each in told] == [
        "Sums.carries is deprecated, use state_size",
        "Sums.advance is deprecated, use update",
    ]
    assert {each.filename for each in told} == {__file__}
    scorer = kind()
    assert scorer.state_size == 1
    assert declares(scorer, "accumulates")
    check_scorer(scorer)
    found, state = kind(2.0).update(layer())
    own, own_state = AccumulatedAttentionScorer().update(layer())
    assert torch.equal(found, own + 2)
    assert torch.equal(state, own_state + 2)
    selector = GQAGroupSelector(retention_tokens=4)
    decided = DecodingEviction(scorer, selector).decide(layer())
    expected = DecodingEviction(AccumulatedAttentionScorer(), selector).decide(layer())
    assert torch.equal(decided[0], expected[0])
    assert decided[1] is not None
    assert torch.equal(decided[1], own_state)


def test_overriding_under_an_earlier_name_is_overriding() -> None:
    with warning(r"Doubled\.advance"):

        @attrs.frozen
        class Doubled(AccumulatedAttentionScorer):
            def advance(self, context: LayerContext) -> tuple[Tensor, Tensor]:
                with pytest.warns(DeprecationWarning, match="is deprecated"):
                    found, state = super().advance(context)
                return 2 * found, state

    found, _ = Doubled().update(layer())
    assert torch.equal(found, 2 * AccumulatedAttentionScorer().update(layer())[0])
    assert not declares(Doubled(), "accumulates")  # which is of what the parent does


def test_overriding_anew_what_was_written_with_the_earlier_names() -> None:
    with pytest.warns(DeprecationWarning, match="is deprecated"):
        kind = earlier_scorer()

    class Halved(kind):  # type: ignore[misc]
        def update(self, context: LayerContext) -> tuple[Tensor, Tensor]:
            found, state = super().update(context)
            return found / 2, state

    expected = AccumulatedAttentionScorer().update(layer())[0]
    assert torch.equal(Halved().update(layer())[0], expected / 2)
    with warning(r"Halved\.advance"):
        assert torch.equal(Halved().advance(layer())[0], expected / 2)


def test_earlier_names_from_a_class_beside() -> None:
    class Beside:
        def advance(self, context: LayerContext) -> tuple[Tensor, Tensor]:
            return context.values[..., 0].float(), context.values[..., :1].float()

    with pytest.warns(DeprecationWarning, match="is deprecated") as told:

        @attrs.frozen
        class Mixed(Beside, AccumulatedAttentionScorer):
            carries: int = 1

    assert len(told) == 2
    assert torch.equal(Mixed().update(layer())[0], layer().values[..., 0])
    assert Mixed(3).state_size == 3


def test_a_scorer_with_both_names_warns_of_none() -> None:
    class Both(AccumulatedAttentionScorer):
        @property
        def state_size(self) -> int:
            return 2

        @property
        def carries(self) -> int:
            return 2

    assert Both().state_size == 2


def test_a_second_reading() -> None:
    with warning("reading= of CachePolicy") as told:
        policy = CachePolicy(*PARTS, **EARLIER)
    assert told[0].filename == __file__
    assert policy == CachePolicy(*PARTS, rereading=Repetition(7))
    assert str(policy).endswith("rereading=Repetition(chunk_size=7))")
    with warning(r"CachePolicy\.reading"):
        assert policy.reading == Repetition(7)
    with warning(r"CachePolicy\.reading"):
        assert KVzip(chunk_size=9).reading.chunk_size == 9
    with warning("reading= of CachePolicy"):
        again = attrs.evolve(policy, reading=Repetition(8))  # type: ignore[call-arg]
    assert again.rereading == Repetition(8)
    assert copy.deepcopy(again) == again
    assert "rereading" in inspect.signature(CachePolicy).parameters


def test_a_description_of_an_earlier_version() -> None:
    for policy in (
        CachePolicy(*PARTS, rereading=Repetition(7)),
        CachePolicy(*PARTS),
        SnapKV(),
        H2O(decoding=64),
    ):
        description = describe(policy)
        if "rereading" in description["fields"]:
            description["fields"]["reading"] = description["fields"].pop("rereading")
        assert from_description(description) == policy  # without a warning
